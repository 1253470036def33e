"""Names, groups and tags in trackers: from experiment, cluster and job; never over what the configuration says."""

from __future__ import annotations

import pytest

from megatron.cluster.profile import ClusterProfile
from megatron.jobs.overrides import job_overrides
from megatron.neox_arguments import NeoXArgs

ENV = {"SLURM_JOB_ID": "71", "DEEPY_EXPERIMENT": "exp1"}
TAGS = ("site", "big", "GH200", "exp1", "job_71")


def identity(tmp_path, text="use_wandb: true\n", env=ENV, first_job=None):
    path = tmp_path / "config.yml"
    path.write_text(f"num_layers: 2\n{text}")
    profile = ClusterProfile("big", tmp_path / "big.yml", provider="site", gpu="GH200")
    return NeoXArgs.from_files([str(path)], job_overrides([str(path)], [], profile, env, first_job=first_job)).logging


def test_wandb(tmp_path):
    log = identity(tmp_path)
    assert (log.wandb_run_name, log.wandb_group, log.wandb_tags) == ("exp1_big_71", "exp1/big", TAGS)
    assert log.comet_tags is None and log.comet_experiment_name is None


def test_comet(tmp_path):
    log = identity(tmp_path, "use_comet: true\n")
    assert (log.comet_experiment_name, log.comet_tags) == ("exp1_big_71", TAGS)
    assert log.wandb_run_name is None and log.wandb_tags is None


def test_all_jobs_of_a_chain_have_the_name_of_the_first(tmp_path):
    assert identity(tmp_path, env=ENV | {"SLURM_JOB_ID": "99"}, first_job="71") == identity(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "stays"),
    [("wandb_run_name", "mine", "mine"), ("wandb_tags", "[a]", ("a",)), ("wandb_group", "g", "g")],
)
def test_what_the_config_sets_stays(tmp_path, key, value, stays):
    log = identity(tmp_path, f"use_wandb: true\n{key}: {value}\n")
    expected = {"wandb_run_name": "exp1_big_71", "wandb_group": "exp1/big", "wandb_tags": TAGS} | {key: stays}
    assert {name: getattr(log, name) for name in expected} == expected


def test_without_a_tracker_nothing_is_set(tmp_path):
    log = identity(tmp_path, "")
    assert log.wandb_run_name is None and log.comet_experiment_name is None


@pytest.mark.parametrize(
    ("text", "env", "name"),
    [
        ("save: /x/runs/best/\n", {"SLURM_JOB_ID": "71"}, "best_big_71"),
        ("save: /x/runs/best/checkpoints\n", {"SLURM_JOB_ID": "71"}, "best_big_71"),
        ("", {"SLURM_JOB_ID": "71"}, None),
        ("", {"DEEPY_EXPERIMENT": "e"}, "e_big"),
        ("", ENV | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, "exp1_big_70_3"),
    ],
)
def test_experiment_and_job(tmp_path, text, env, name):
    assert identity(tmp_path, f"use_wandb: true\n{text}", env).wandb_run_name == name


def test_a_tag_is_never_longer_than_wandb_takes(tmp_path):
    log = identity(tmp_path, env=ENV | {"DEEPY_EXPERIMENT": "x" * 100})
    assert log.wandb_tags[3] == "x" * 64
