"""pretrain_neox.sbatch and run_on_compute.sbatch, run as SLURM runs them: a copy, with a stand-in for srun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.cpu

Submit = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
SRUN = """#!/bin/sh
echo "srun $*"
echo "$MASTER_ADDR:$MASTER_PORT $PROFILE_WAS_READ $SLURM_GPUS_PER_NODE"
exit 3
"""
FILES = ("deepy.py", "train.py", "pretrain_neox.sbatch", "run_on_compute.sbatch")
CONFIG = """
num_layers: 2
hidden_size: 16
num_attention_heads: 2
seq_length: 8
train_micro_batch_size_per_gpu: 1
train_iters: 2
data_path: tokens
"""


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """`submit(SCRIPT, ARGUMENT...)` from a folder with run.yml and another `megatron`; `scontrol` knows the script.

    Deepy is a folder without a .venv, so that the python3 on PATH is used.
    """
    deepy = tmp_path / "dee py"
    deepy.mkdir()
    for name in ("megatron", "slurm", "huggingface", *FILES):
        (deepy / name).symlink_to(ROOT / name)
    folder, copy = tmp_path / "my runs", tmp_path / "spool/slurm_script"
    for name in ("bin", "spool", "my runs", "clusters", "home"):
        (tmp_path / name).mkdir()
    (folder / "run.yml").write_text(CONFIG)
    (folder / "megatron").mkdir()  # of another clone, such as the one that the user switches from
    (folder / "megatron/__init__.py").write_text("raise SystemExit('another megatron was imported')\n")
    (tmp_path / "clusters/here.yml").write_text("environment: {PROFILE_WAS_READ: 'yes'}\n")
    answer = f'echo "JobId=4007"; echo "   Command=$TEST_SCRIPT run.yml /a/x.sbatch"; echo "   WorkDir={folder}"\n'
    python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, text in {"srun": SRUN, "python3": python, "scontrol": f"#!/bin/sh\n{answer}"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(script: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        shutil.copy(ROOT / script, copy)
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "DEEPY_", "MASTER_", "PYTHONPATH"))}
        slurm = {"SLURM_JOB_ID": "4007", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
        slurm |= {"SLURM_GPUS_ON_NODE": "2", "SLURM_TASKS_PER_NODE": "8", "SLURM_SUBMIT_DIR": str(folder)}
        ours |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path / "home")}
        ours |= {"DEEPY_CLUSTERS": str(tmp_path / "clusters"), "TEST_SCRIPT": str(deepy / script)}
        command = ["bash", str(copy), *argv]
        return subprocess.run(command, env=ours | slurm | env, cwd=folder, capture_output=True, text=True, timeout=60)

    return run


def test_a_job_starts_one_rank_per_gpu_and_keeps_the_code(submit: Submit) -> None:
    done = submit("pretrain_neox.sbatch", "run.yml", "train_iters=5", DEEPY_CLUSTER="here")
    first, second = done.stdout.splitlines()
    assert first.startswith("srun -n 2 --kill-on-bad-exit=1 --export=ALL ") and f" -u {ROOT}/train.py " in first
    assert second == "localhost:29507 yes 2"  # 29500 + 4007 % 1000
    assert done.returncode == 3, done.stderr  # saved and stopped: start again


def test_deepy_is_found(submit: Submit, tmp_path: Path) -> None:
    """Where the script was, in DEEPY_HOME, where it is submitted from; else it is an error."""
    lost = {"TEST_SCRIPT": f"{tmp_path}/copied.sbatch"}
    script = "pretrain_neox.sbatch"
    done = submit(script, "none.yml", **lost, SLURM_SUBMIT_DIR=str(tmp_path / "dee py"))
    assert done.returncode == 2 and "none.yml" in done.stderr  # so Deepy was found
    done = submit(script, "none.yml", **lost, DEEPY_HOME=str(tmp_path / "dee py"))
    assert done.returncode == 2 and "none.yml" in done.stderr
    (tmp_path / "bin/scontrol").write_text("#!/bin/sh\nexit 1\n")  # no answer
    done = submit(script, "none.yml", DEEPY_HOME=str(tmp_path / "dee py"))
    assert done.returncode == 2 and "none.yml" in done.stderr
    done = submit(script, "none.yml", **lost)
    assert done.returncode == 2 and "DEEPY_HOME" in done.stderr and f"{tmp_path}/my runs" in done.stderr


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        ("pretrain_neox.sbatch", ["run.yml"]),
        ("run_on_compute.sbatch", ["true"]),
        ("slurm/evaluate.sbatch", ["run", "1"]),
        ("huggingface/convert_hf_to_neox.sbatch", ["model"]),
    ],
)
def test_where_several_clones_are_the_order_is_the_same_in_all_scripts(
    submit: Submit, tmp_path: Path, script: str, argv: list[str]
) -> None:
    """A link that is submitted again has its script next to the checkpoints, and DEEPY_HOME names its tree."""
    clones = {name: tmp_path / f"clone {name}" for name in ("script", "home", "submitted")}
    for name, clone in clones.items():  # whose Python only says which clone it is of
        for file in ("jobs/environment.py", "jobs/evaluation.py"):
            (clone / "megatron" / file).parent.mkdir(parents=True, exist_ok=True)
            (clone / "megatron" / file).write_text("")
        for folder in ("slurm", "huggingface"):
            (clone / folder).symlink_to(ROOT / folder)
        (clone / ".venv/bin").mkdir(parents=True)
        for python in ("python", "python3"):
            (clone / ".venv/bin" / python).write_text(f'#!/bin/sh\ntouch "{tmp_path}/used {name}"\nexit 9\n')
            (clone / ".venv/bin" / python).chmod(0o755)

    def used(where: str) -> list[str]:
        for old in tmp_path.glob("used *"):
            old.unlink()
        env = {"SLURM_SUBMIT_DIR": str(clones["submitted"]), "DEEPY_HOME": str(clones["home"])}
        submit(script, *argv, **env, TEST_SCRIPT=where)
        return [path.name for path in tmp_path.glob("used *")]

    assert used(f"{tmp_path}/save/chain.sbatch") == ["used home"]
    assert used(f"{clones['script']}/{script}") == ["used script"]  # an old DEEPY_HOME in the user's environment


def test_what_is_missing_is_reported(submit: Submit, tmp_path: Path) -> None:
    assert submit("pretrain_neox.sbatch").returncode == 2
    done = submit("pretrain_neox.sbatch", "run.yml", DEEPY_CLUSTER="elsewhere")
    assert done.returncode == 2 and "elsewhere" in done.stderr and "here" in done.stderr and done.stdout == ""
    (tmp_path / "clusters/here.yml").write_text("enviroment: {A: 1}\n")
    done = submit("pretrain_neox.sbatch", "run.yml", DEEPY_CLUSTER="here")
    assert done.returncode == 2 and "here.yml:1:" in done.stderr and done.stdout == ""


def test_a_python_without_what_deepy_needs(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    done = submit("pretrain_neox.sbatch", "run.yml")
    assert done.returncode == 2 and "setup_uv_env.sh" in done.stderr
    (tmp_path / "site/yaml").parent.mkdir()
    (tmp_path / "site/yaml").symlink_to(Path(yaml.__file__).parent)  # and nothing else, as many systems have it
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    for script, *argv in (("pretrain_neox.sbatch", "run.yml"), ("slurm/evaluate.sbatch", "run", "1")):
        done = submit(script, *argv, PYTHONPATH=str(tmp_path / "site"))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert " lacks numpy, psutil, torch, deepspeed: " in done.stderr and "setup_uv_env.sh" in done.stderr
    done = submit("run_on_compute.sbatch", "true", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0 and "has no .venv" not in done.stderr  # so with the profile


def test_any_command_on_a_node(submit: Submit, tmp_path: Path) -> None:
    command = ["sh", "-c", 'echo "$PROFILE_WAS_READ|$PWD|$1"; exit 7', "sh", "two words"]
    done = submit("run_on_compute.sbatch", *command, DEEPY_CLUSTER="here")
    assert done.returncode == 7 and done.stdout == f"yes|{tmp_path}/my runs|two words\n", done.stderr
    done = submit("slurm/run_on_compute.sbatch", *command, DEEPY_CLUSTER="here")  # by its own place
    assert done.returncode == 7 and done.stdout.startswith("yes|")
    done = submit("run_on_compute.sbatch", *command, DEEPY_CLUSTER="elsewhere")
    assert done.returncode == 2 and done.stdout == ""
    # a bare system Python, before there is a .venv
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    done = submit("run_on_compute.sbatch", *command, DEEPY_CLUSTER="here")
    assert done.returncode == 7 and done.stdout == f"|{tmp_path}/my runs|two words\n"
    assert submit("run_on_compute.sbatch").returncode == 2
