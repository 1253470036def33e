"""Paths of another cluster in a configuration: rewritten whole component by component, or left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.cluster.profile import load_profile
from megatron.errors import UserError
from megatron.jobs.overrides import adapt
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.merge import merge

BASE = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8}
ENV = {"USER": "ada", "HOME": "/users/ada", "SCRATCH": "/scratch/ada"}


@pytest.fixture
def clusters(tmp_path):
    """here, there and old as profiles; a function from keys of a config to the keys that `here` changes."""
    profiles = {
        "here": {
            "folders": {"data": "/lustre/data", "checkpoints": "${SCRATCH}/ckpt", "tokenizers": "/lustre/tok"},
            "remap": {"/gone/public": "/lustre/public"},
        },
        "there": {"folders": {"data": "/mnt/${USER}/data", "checkpoints": "/mnt/ckpt", "tokenizers": "/mnt/ckpt/tok"}},
        "old": {"folders": {"data": "${SCRATCH}/old", "logs": "/old/logs"}},
    }
    found = {}
    for name, keys in profiles.items():
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(keys))
        found[name] = load_profile(str(tmp_path / f"{name}.yml"), ENV)

    def run(name="here", extra=(), env=ENV, **keys):
        file = tmp_path / "run" / "config.yml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(BASE | keys))
        adapted = adapt([str(file)], extra, found[name], env, others=list(found.values()))
        after = merge([str(file)], [*extra, *adapted.overrides])
        before = merge([str(file)], extra)
        return {key: after.values[key] for key in after.values if after.values[key] != before.values.get(key)}, adapted

    return run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/mnt/ada/data/pile_text_document", "/lustre/data/pile_text_document"),
        ("/mnt/ckpt/run1", "/scratch/ada/ckpt/run1"),
        ("/mnt/ckpt", "/scratch/ada/ckpt"),
        ("/mnt/ckpt/tok/20B.json", "/lustre/tok/20B.json"),  # the longest prefix
        ("/gone/public/x", "/lustre/public/x"),
        ("/mnt/ckpt2/run1", None),  # no whole component
        ("/mnt/ada", None),
        ("/mnt/bob/data/x", None),
        ("mnt/ckpt/x", None),
        ("/scratch/ada/old/x", None),  # a variable of another cluster does not have this cluster's value
        ("/old/logs/x", None),  # a kind of folder that this cluster does not name
        ("/lustre/data/x", None),
    ],
)
def test_a_path(clusters, old, new):
    changed, adapted = clusters(save=old)
    assert changed == ({} if new is None else {"save": new})
    assert adapted.changes == [] or (f"save: {old} -> {new}" in adapted.changes[0] and len(adapted.changes) == 1)


def test_paths_inside_lists_mixtures_and_the_command_line(clusters, tmp_path):
    sources = {"web": "/mnt/ada/data/web", "code": {"path": "/x"}}
    mixture = {"sources": sources, "weights": {"web": 1e-05, "code": 1.0}}
    changed, adapted = clusters(mixture=mixture, vocab_file="/x", extra=["vocab_file=/mnt/ckpt/tok/a b"])
    assert changed["vocab_file"] == "/lustre/tok/a b"
    assert "/lustre/data/web" in str(changed["mixture"]) and "/mnt" not in str(changed["mixture"])
    assert changed["mixture"]["weights"]["web"] == 1e-05 and set(changed) == {"vocab_file", "mixture"}
    assert len(adapted.changes) == 2
    changed, _ = clusters(train_data_paths=["/mnt/ada/data/a", "/y"], train_data_weights=[1.0, 2.0])
    assert list(changed["train_data_paths"]) == ["/lustre/data/a", "/y"]


def test_the_files_stay_as_they_are_and_their_own_cluster_changes_nothing(clusters, tmp_path):
    keys = {"save": "/mnt/ckpt/run1", "data_path": "/mnt/ada/data/x"}
    clusters(**keys)
    assert yaml.safe_load((tmp_path / "run" / "config.yml").read_text()) == BASE | keys
    changed, adapted = clusters("there", **keys)
    assert changed == {} and adapted.overrides == []


def test_a_folder_whose_variable_is_not_set_is_no_rule(clusters):
    changed, _ = clusters(env={"USER": "ada"}, save="/mnt/ckpt/run1", data_path="/mnt/ada/data/x")
    assert changed == {"data_path": "/lustre/data/x"}


def test_one_folder_for_two_kinds_is_refused_only_where_it_matters(tmp_path):
    for name, folders in {
        "here": {"data": "/here/data", "checkpoints": "/here/ckpt"},
        "there": {"data": "/mnt", "checkpoints": "/mnt"},
    }.items():
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump({"folders": folders}))
    here, there = (load_profile(str(tmp_path / f"{name}.yml"), ENV) for name in ("here", "there"))
    file = tmp_path / "config.yml"
    file.write_text("num_layers: 2\nsave: /mnt/run1\n")
    with pytest.raises(UserError) as error:
        adapt([str(file)], [], here, ENV, others=[there])
    for word in (f"{file}:2", "/mnt/run1", "/here/data", "/here/ckpt", "remap"):
        assert word in str(error.value)
    file.write_text("num_layers: 2\nsave: /elsewhere\n")
    assert adapt([str(file)], [], here, ENV, others=[there]).overrides == []


def test_a_shipped_config_is_read_with_its_overrides(clusters):
    """Overrides are the same text everywhere: a plain path as well as YAML's special words."""
    changed, adapted = clusters(save="/mnt/ckpt/null", load="/mnt/ckpt/a: b", log_dir="/mnt/ckpt/#1")
    assert changed == {
        f"{key}": f"/scratch/ada/ckpt/{end}" for key, end in [("save", "null"), ("load", "a: b"), ("log_dir", "#1")]
    }
    root = Path(__file__).resolve().parents[2]
    NeoXArgs.from_ymls([str(root / "configs/tiny.yml")], adapted.overrides)
