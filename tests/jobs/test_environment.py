"""The shell lines of a profile, evaluated by a real bash; ranks of a job from recorded variables of SLURM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.cluster.hostfile import parse_hostfile
from megatron.cluster.profile import ClusterProfile, load_profile
from megatron.cluster.slurm import OF_TRAINING, Slurm
from megatron.errors import UserError
from megatron.jobs.environment import (
    link_log,
    nccl_lines,
    node_states,
    profile_lines,
    quote,
    ranks_of,
    system_library,
    training_lines,
    write_hostfile,
)

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
# What SLURM 22.05 sets in a job of `sbatch --nodes=2 --exclusive` on nodes with 8 cores and 4 GPUs.
EXCLUSIVE = {
    "SLURM_JOB_ID": "30079",
    "SLURM_JOB_NODELIST": "p[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_GPUS_ON_NODE": "4",
}
PLAIN = ClusterProfile("plain", Path("plain.yml"))
Commands = Callable[..., Slurm]


def profile_of(tmp_path: Path, text: str) -> ClusterProfile:
    (tmp_path / "site.yml").write_text(text)
    return load_profile(str(tmp_path / "site.yml"), {"HOME": str(tmp_path)})


def variables_after(lines: list[str], names: list[str], **env: str) -> dict[str, str]:
    """The values of exported variables after bash has evaluated the lines as the job script does."""
    shown = f"import os; print('\\0'.join(os.environ.get(name, '<unset>') for name in {names}), end='')"
    script = f'set -eo pipefail\neval "$LINES_OF_PROFILE"\nexec "{sys.executable}" -S -E -c "{shown}"'
    base = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "LINES_OF_PROFILE": "\n".join(lines)}
    done = subprocess.run(["bash", "-c", script], env=base | env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return dict(zip(names, done.stdout.split("\0")))


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Stand-ins for SLURM's commands: each prints a text that the real one printed."""

    def make(**texts: str) -> Slurm:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            (folder / f"{name}.txt").write_text(text)
            (folder / name).write_text(f'#!/bin/sh\nexec cat "{folder}/{name}.txt"\n')
            (folder / name).chmod(0o755)
        return Slurm(env={"PATH": f"{folder}:{os.environ['PATH']}"})

    return make


NASTY = "a b'c\"d $HOME `id` $(id) \\ ; # \u00e9 & *"


def test_variables_arrive_exactly_and_are_expanded_where_they_say_so(tmp_path: Path) -> None:
    values = {
        "PLAIN": NASTY,
        "EMPTY": "",
        "JOINED": "${HERE}/x y:${MISSING:-d; e & *}:${MISSING}!",
        "LATER": "${PLAIN}",  # set by the lines before
    }
    lines = [f"export {name}={quote(value)}" for name, value in values.items()]
    got = variables_after(lines, list(values), HERE="/he re/$x")
    assert got["PLAIN"] == got["LATER"] == NASTY and got["EMPTY"] == ""
    assert got["JOINED"] == "/he re/$x/x y:d; e & *:!"


def test_modules_come_first_and_a_failing_one_ends_the_job_with_2(tmp_path: Path) -> None:
    (tmp_path / "init").mkdir()
    # `module` is a function that the site's init file defines; loading a module sets variables
    (tmp_path / "init/bash").write_text(
        'module() { echo "module $*" >> "$LOG"; if [ "$1" = load ]; then export CUDA_HOME="/sw/$2"; fi; '
        '[ "$2" != broken ]; }\n'
    )
    text = "modules: {purge: true, load: [one/1, 'two 2']}\nenvironment: {WHERE: '${CUDA_HOME}/lib'}\n"
    env = {"HOME": str(tmp_path)}
    lines = list(profile_lines(profile_of(tmp_path, text), env))
    log = tmp_path / "log"
    got = variables_after(lines, ["WHERE", "DEEPY_CLUSTER"], MODULESHOME=str(tmp_path), LOG=str(log))
    assert got == {"WHERE": "/sw/two 2/lib", "DEEPY_CLUSTER": str(tmp_path / "site.yml")}
    assert log.read_text().splitlines() == ["module purge", "module load one/1", "module load two 2"]
    lines = list(profile_lines(profile_of(tmp_path, "modules:\n  load: [broken]\n"), env))
    script = "set -eo pipefail\n" + "\n".join(lines) + "\necho more"
    variables = {"PATH": os.environ["PATH"], "MODULESHOME": str(tmp_path), "LOG": str(log)}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stdout == "" and "site.yml:2: `module load broken`" in done.stderr


def test_folders_are_made(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, "folders:\n  logs: ${HOME}/my logs\n  tmp: ${HOME}/file/tmp\n")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"site\.yml:3: folders\.tmp: .*file/tmp"):
        list(profile_lines(profile, {"HOME": str(tmp_path)}))
    (tmp_path / "file").unlink()
    got = variables_after(list(profile_lines(profile, {"HOME": str(tmp_path)})), ["TMPDIR", "WANDB_DIR"])
    assert got == {"TMPDIR": str(tmp_path / "file/tmp"), "WANDB_DIR": str(tmp_path / "my logs/wandb")}
    assert all(Path(folder).is_dir() for folder in got.values())


def test_the_nccl_of_the_module_and_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("module/lib", "other", "v/site-packages/nvidia/nccl/lib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libnccl.so.2").touch()
    wheel = tmp_path / "v/site-packages/nvidia/nccl/lib/libnccl.so.2"
    paths = f"{wheel.parent}:{tmp_path}/none::{tmp_path}/other"
    assert system_library({"LD_LIBRARY_PATH": paths}) == tmp_path / "other/libnccl.so.2"
    found = system_library({"LD_LIBRARY_PATH": paths, "NCCL_HOME": str(tmp_path / "module")})
    assert found == tmp_path / "module/lib/libnccl.so.2"

    (tmp_path / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names, env = ["NCCL_LIBRARY", "LD_PRELOAD"], {"HOME": str(tmp_path)}
    # LD_PRELOAD of an empty file is a warning of the loader, which the stand-in Python does not mind
    lines = list(profile_lines(profile_of(tmp_path, "nccl: system\n"), env))
    got = variables_after(lines, names, LD_LIBRARY_PATH=paths, PYTHONPATH=str(tmp_path))
    assert got == dict.fromkeys(names, str(tmp_path / "other/libnccl.so.2"))
    monkeypatch.syspath_prepend(str(tmp_path / "v/site-packages"))
    lines = list(profile_lines(profile_of(tmp_path, "nccl: system\n"), env, "wheel"))  # --nccl wheel
    assert variables_after(lines, names) == dict.fromkeys(names, str(wheel))
    lines = list(profile_lines(profile_of(tmp_path, "gpu: H100\n"), env))
    assert variables_after(lines, names) == dict.fromkeys(names, "<unset>")


def test_an_nccl_that_is_too_old_for_torch_ends_the_job_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libnccl.so.2").touch()
    fault = "/v/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommShrink"
    (tmp_path / "torch.py").write_text(f"raise ImportError({fault!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = "set -eo pipefail\n" + "\n".join(nccl_lines(tmp_path / "libnccl.so.2", "")) + "\necho more"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stdout == ""
    assert all(part in done.stderr for part in ("libnccl.so.2", "ncclCommShrink", "nccl: wheel"))


@pytest.mark.parametrize(
    ("variables", "per_node", "gpus"),
    [
        ({}, 4, 4),  # --exclusive brings all GPUs
        ({"SLURM_GPUS_PER_NODE": "2"}, 2, 2),
        ({"SLURM_GPUS_PER_NODE": "a100:3"}, 3, 3),
        ({"SLURM_GPUS": "8"}, 4, 4),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "4"}, 2, 4),
        ({"SLURM_NTASKS": "6"}, 3, 4),
        ({"SLURM_GPUS_PER_NODE": "0"}, 1, 0),
        ({"SLURM_GPUS_PER_NODE": "0", "SLURM_NTASKS_PER_NODE": "8"}, 8, 0),
        ({"SLURM_GPUS_ON_NODE": ""}, 1, 0),
    ],
)
def test_ranks_follow_the_gpus_else_the_tasks(variables: dict[str, str], per_node: int, gpus: int) -> None:
    ranks = ranks_of(EXCLUSIVE | variables, PLAIN)
    assert (ranks.nodes, ranks.per_node, ranks.gpus) == (2, per_node, gpus)


def test_ranks_without_a_single_answer_are_refused() -> None:
    for variables, part in [({"SLURM_GPUS": "6"}, "--gpus=6"), ({"SLURM_NTASKS": "5"}, "--ntasks=5")]:
        with pytest.raises(UserError, match=part):
            ranks_of(EXCLUSIVE | variables, PLAIN)
    has_four = ClusterProfile("site", Path("site.yml"), gpus_per_node=4)
    with pytest.raises(UserError, match="--gpus-per-node=4"):
        ranks_of(EXCLUSIVE | {"SLURM_GPUS_ON_NODE": ""}, has_four)
    assert ranks_of(EXCLUSIVE | {"SLURM_GPUS_PER_NODE": "0"}, has_four).per_node == 1  # asked for


# What `sinfo --Node` printed for five nodes, of which two are in two partitions.
SINFO = "".join(
    f"{node}\x1f{partition}\x1f{state}\x1fgpu:4\x1fgpu:0\x1f\n"
    for node, partition, state in [
        *(("p1", "main*", "idle"), ("p2", "main*", "allocated"), ("p2", "low", "allocated"), ("p3", "low", "mixed")),
        *(("p4", "main*", "down+not_responding"), ("p5", "main*", "idle"), ("p5", "low", "idle")),
    ]
)


def test_lines_of_a_training_job(tmp_path: Path, commands: Commands, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="deepy")
    text = "exclude_nodes: [p2, p9]\nhub_offline: true\n"
    lines = list(training_lines(profile_of(tmp_path, text), EXCLUSIVE, commands(sinfo=SINFO)))
    names = ["SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_PER_NODE", "MASTER_PORT", "HF_HUB_OFFLINE"]
    assert list(variables_after(lines, names).values()) == ["8", "4(x2)", "4", "29579", "1"]  # 29500 + 30079 % 1000
    assert variables_after(lines, [OF_TRAINING]) == {OF_TRAINING: "HF_HUB_OFFLINE"}  # evaluations are without it
    by_user = training_lines(profile_of(tmp_path, text), {"HF_HUB_OFFLINE": "0"}, Slurm())
    assert not [line for line in by_user if "OFFLINE" in line]
    said = caplog.text
    assert "8 ranks" in said and "2 idle" in said and "1 down" in said
    assert "site.yml:1" in said and "p2" in said and "--exclude=p2,p9" in said
    lines = list(training_lines(PLAIN, EXCLUSIVE | {"MASTER_PORT": "7"}, Slurm(env={"PATH": "/nowhere"})))
    assert variables_after(lines, names, MASTER_PORT="7") | {"SLURM_NTASKS": "8"} == {
        **dict(zip(names, ["8", "4(x2)", "4", "7", "<unset>"])),
    }  # without sinfo the job starts all the same
    assert list(training_lines(PLAIN, {}, Slurm())) == []  # by hand, outside of a job


def test_every_rank_sees_the_gpus_of_its_node(commands: Commands) -> None:
    """With `--gpus-per-task=1`, ranks other than the first of a node would find no GPU of their number."""
    given = {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "single:1", "SLURM_NTASKS_PER_NODE": "4"}
    given |= {"SLURM_TRES_PER_TASK": "cpu:2", "SLURM_TRES_BIND": "gres/gpu:closest"}
    lines = list(training_lines(PLAIN, EXCLUSIVE | given, Slurm(env={"PATH": "/nowhere"})))
    names = [*given, "SLURM_GPUS_PER_NODE"]
    expected = dict.fromkeys(names, "<unset>") | {"SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_PER_NODE": "4"}
    assert variables_after(lines, names, **given) == expected | {"SLURM_TRES_PER_TASK": "cpu:2"}


# Parts of what `scontrol --oneliner show job` printed for three jobs of two nodes.
SHOWN = "JobId=30079 JobName=x Restarts=0 NumNodes=2-2 NumCPUs=16 NumTasks={} CPUs/Task={} NtasksPerN:B:S:C={}:0:*:* "


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (SHOWN.format(2, 1, 0), {"SLURM_NTASKS": "8", "SLURM_GPUS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "<unset>"}),
        (
            SHOWN.format(20, 2, 10) + "TresPerNode=gres:gpu:2",
            {"SLURM_NTASKS": "20", "SLURM_GPUS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "2"},
        ),
        (SHOWN.format(6, 1, 0) + "TresPerJob=gres:gpu:8", {"SLURM_NTASKS": "6", "SLURM_GPUS": "8"}),
    ],
)
def test_a_job_submitted_inside_of_another_has_none_of_its_numbers(
    commands: Commands, shown: str, expected: dict[str, str]
) -> None:
    """As from the shell of `salloc` or `srun --pty`."""
    outer = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "a100:1", "SLURM_GPUS": "1"}
    outer |= {
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_CPU_BIND": "x",
        "SLURM_RESTART_COUNT": "3",
    }
    lines = list(training_lines(PLAIN, EXCLUSIVE | outer, commands(scontrol=shown, sinfo=SINFO)))
    expected = {
        "SLURM_STEP_NUM_TASKS": "<unset>",
        "SLURM_CPU_BIND": "<unset>",
        "SLURM_RESTART_COUNT": "<unset>",
    } | expected
    assert variables_after(lines, list(expected), **outer) == expected


def test_states_of_the_nodes_count_each_once(commands: Commands) -> None:
    assert node_states(commands(sinfo=SINFO)) == "2 idle, 1 allocated, 1 down+not_responding, 1 mixed"


def test_the_log_is_linked_into_the_folder_of_logs(tmp_path: Path, commands: Commands) -> None:
    profile = profile_of(tmp_path, "folders: {logs: '${HOME}/logs'}\n")
    (tmp_path / "logs").mkdir()
    log = tmp_path / "run 7-30079.out"
    slurm = commands(scontrol=f"JobId=30079 JobName=x Command=/x/pretrain_neox.sbatch a.yml StdOut={log} Power=\n")
    env = EXCLUSIVE | {"HOME": str(tmp_path)}
    link_log("neox-training-30079.out", profile, env, slurm)
    assert list((tmp_path / "logs").iterdir()) == []  # no such log
    log.write_text("iteration")
    for _ in range(2):  # a requeued job comes again
        link_log("neox-training-30079.out", profile, env, slurm)
    assert (tmp_path / "logs/neox-training-30079.out").read_text() == "iteration"
    link_log("x", profile, env, Slurm(env={"PATH": "/nowhere"}))
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_a_hostfile_for_deepspeed(tmp_path: Path) -> None:
    write_hostfile(tmp_path / "hosts", EXCLUSIVE, PLAIN)
    assert parse_hostfile(tmp_path / "hosts") == {"p1": [0, 1, 2, 3], "p2": [0, 1, 2, 3]}
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST"):
        write_hostfile(tmp_path / "none", {}, PLAIN)
    assert not (tmp_path / "none").exists()


def test_the_command_by_hand(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "DEEPY_"))}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PROJECTDIR_PUBLIC": str(tmp_path)}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megatron.jobs.environment", *argv]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = run("--cluster", "isambard-slingshot")
    assert done.returncode == 0 and "export NCCL_NET='AWS Libfabric'" in done.stdout.splitlines()
    assert (tmp_path / "logs/neox-training/wandb").is_dir()
    done = run("--cluster", "isambard-slingshot", "--sbatch-flags", "debug")
    assert done.stdout == "--partition=workq --time=24:00:00 --nodes=1\n"
    done = run("--cluster", "isambard")
    assert done.returncode == 2 and done.stdout == "" and "isambard-slingshot" in done.stderr
