"""Golden command lines of the launchers (known faults 67 and 71), and what travels with them."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex

import pytest

from megatron.cluster.hostfile import select
from megatron.cluster.launchers import (
    LAUNCHERS,
    RUN_MODULE,
    MultiNodeJob,
    command_environment,
    decode,
    expand_nodelist,
    find_launcher,
    parse_environment_file,
    select_exports,
)
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


def build_command(launcher: str, job: MultiNodeJob) -> list[str]:
    return find_launcher(launcher).command(job)


JOB = MultiNodeJob(
    resources={"worker-0": [0, 1], "worker-1": [0, 1]},
    user_script="train.py",
    resolved_file="/shared/run/.deepy-resolved-x.json",
    config_text='{"train_iters": 5}',
    python="/opt/venv/bin/python",
    folder="/work/my code",
    master_addr="worker-0",
    master_port=29500,
    exports={"NCCL_DEBUG": "INFO and more"},
)
RANK = ["/opt/venv/bin/python", "-u", "train.py", "--resolved", "/shared/run/.deepy-resolved-x.json"]


def test_pdsh_starts_one_agent_per_host_and_carries_the_config_by_value() -> None:
    command = build_command("pdsh", JOB)
    assert command[:-1] == ["pdsh", "-S", "-b", "-N", "-f", "1024", "-w", "worker-0,worker-1"]
    head, agent = command[-1].split(" exec ")
    assert head == "export NCCL_DEBUG='INFO and more'; cd '/work/my code';"
    words = shlex.split(agent)
    assert words[:5] == ["/opt/venv/bin/python", "-u", str(RUN_MODULE), "megatron.cluster.node", "--node_rank=%n"]
    assert words[-1] == "train.py"
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    assert decode(options["config"]) == JOB.config_text
    assert decode(options["resources"]) == {"worker-0": [0, 1], "worker-1": [0, 1]}
    assert (options["master_addr"], options["master_port"]) == ("worker-0", "29500")
    assert JOB.resolved_file not in command[-1]  # no path of this machine is needed over there


def test_pdsh_would_expand_percent_signs_so_they_are_doubled() -> None:
    command = build_command("pdsh", dataclasses.replace(JOB, folder="/d/%n", exports={"TORCH_LOGS": "50%"}))
    assert command[-1].startswith("export TORCH_LOGS=50%%; cd /d/%%n; exec ")
    assert "--node_rank=%n " in command[-1]


def test_openmpi() -> None:
    assert build_command("openmpi", JOB) == [
        *("mpirun", "-n", "4", "--host", "worker-0:2,worker-1:2", "--map-by", "slot", "--bind-to", "none"),
        *("-x", "MASTER_ADDR=worker-0", "-x", "MASTER_PORT=29500", "-x", "NCCL_DEBUG=INFO and more"),
        *RANK,
    ]


@pytest.mark.parametrize("launcher", ["mpich", "mvapich"])
def test_mpich_and_mvapich(launcher: str) -> None:
    assert build_command(launcher, JOB) == [
        *("mpirun", "-n", "4", "-hosts", "worker-0:2,worker-1:2"),
        *("-genv", "MASTER_ADDR", "worker-0", "-genv", "MASTER_PORT", "29500", "-genv", "NCCL_DEBUG", "INFO and more"),
        *RANK,
    ]


def test_slurm() -> None:
    job = dataclasses.replace(JOB, comment="c 1", account="acc")
    assert build_command("slurm", job) == [
        *("srun", "-n", "4", "--nodelist", "worker-0,worker-1", "--nodes", "2", "--ntasks-per-node", "2"),
        *("--comment", "c 1", "--account", "acc", "--kill-on-bad-exit=1", "--export=ALL"),
        *RANK,
    ]
    env = command_environment("slurm", job, {"HOME": "/h", "RANK": "3", "WORLD_SIZE": "9"})
    assert env == {
        "HOME": "/h",
        "MASTER_ADDR": "worker-0",
        "MASTER_PORT": "29500",
        "NCCL_DEBUG": "INFO and more",
    }


def test_slurm_counts_the_filtered_slots_and_never_gets_the_filter_strings() -> None:
    hosts = select({"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}, include="worker-1:0,2")
    job = dataclasses.replace(JOB, resources=hosts)
    text = shlex.join(build_command("slurm", job))
    assert text.startswith("srun -n 2 --nodelist worker-1 ")
    assert "include" not in text and ":0,2" not in text
    assert command_environment("slurm", job, {})["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_each_task_of_slurm_has_its_share_of_the_cores() -> None:
    names = ("SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION")
    given = {"SLURM_CPUS_ON_NODE": "288", "SLURM_NTASKS_PER_NODE": "4"}
    all_nodes, asked, bound = dataclasses.replace(JOB, resources={}, in_allocation=8), "SLURM_CPUS_PER_TASK", "cores"
    for env, expected in (
        (given, ["72", "72", bound, "block:block"]),
        (given | {"SLURM_JOB_CPUS_PER_NODE": "288(x3),62"}, ["14", "14", bound, "block:block"]),  # the same everywhere
        (given | {asked: "16"}, ["16", "16", bound, "block:block"]),
        (given | {asked: "16", "OMP_NUM_THREADS": "1", "SRUN_CPUS_PER_TASK": "8"}, ["8", "1", bound, "block:block"]),
        (given | {"SLURM_CPU_BIND": "none", "SLURM_DISTRIBUTION": "cyclic"}, ["72", "72", "none", "cyclic"]),
        (given | {"SLURM_CPUS_ON_NODE": "6"}, [None, "1", None, None]),
        ({"SLURM_CPUS_ON_NODE": "288"}, [None] * 4),
    ):
        ours = command_environment("slurm", all_nodes, env)
        assert [ours.get(name) for name in names] == expected
        assert set(command_environment("pdsh", JOB, env)) & set(names) == set(env) & set(names)
    assert command_environment("slurm", JOB, {"SLURM_CPUS_ON_NODE": "288"})["SRUN_CPUS_PER_TASK"] == "144"


def test_slurm_within_an_allocation_uses_all_its_tasks() -> None:
    job = dataclasses.replace(JOB, resources={}, in_allocation=8)
    assert build_command("slurm", job) == ["srun", "-n", "8", "--kill-on-bad-exit=1", "--export=ALL", *RANK]


def test_what_only_pdsh_can_do_is_refused_elsewhere() -> None:
    uneven = dataclasses.replace(JOB, resources={"a": [0, 1], "b": [1, 3]})
    for launcher in set(LAUNCHERS) - {"pdsh"}:
        with pytest.raises(UserError, match="pdsh"):
            command_environment(launcher, uneven, {}), build_command(launcher, uneven)
    with pytest.raises(UserError, match="same number of slots"):
        build_command("slurm", dataclasses.replace(JOB, resources={"a": [0], "b": [0, 1]}))
    with pytest.raises(UserError, match="Did you mean 'slurm'"):
        build_command("slurmm", JOB)


def test_a_config_too_long_for_a_command_line_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="shorten"):
        build_command("pdsh", dataclasses.replace(JOB, config_text=os.urandom(90_000).hex()))


def test_exports_carry_library_settings_but_no_secrets() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "s3cret",
        "HF_TOKEN": "t",
        "HOME": "/h",
        "PYTHONPATH": "/p",
        "RANK": "1",
    }
    exports, kept_back = select_exports(env, {"MY_FLAG": "1"})
    assert exports == {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/p", "MY_FLAG": "1"}
    assert kept_back == ["HF_TOKEN", "WANDB_API_KEY"]


def test_environment_file() -> None:
    text = "# c\nA=1\n\nexport B=x=y z\n"
    assert parse_environment_file(text, ".deepspeed_env") == {"A": "1", "B": "x=y z"}
    with pytest.raises(UserError, match=".deepspeed_env:2"):
        parse_environment_file("A=1\nnonsense\n", ".deepspeed_env")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("a[1-3,07],b", ["a1", "a2", "a3", "a07", "b"]),
        ("nid[001-003]", ["nid001", "nid002", "nid003"]),
        ("r[1-2]n[8-9]x", ["r1n8x", "r1n9x", "r2n8x", "r2n9x"]),
        ("gpu-a[1,3],gpu-b[2]", ["gpu-a1", "gpu-a3", "gpu-b2"]),
        ("nid119-ib,nid121-ib,r0n[0-1],r1n[0-1]", ["nid119-ib", "nid121-ib", "r0n0", "r0n1", "r1n0", "r1n1"]),
        ("a[09-11],n.x[00041,00043-00044]", ["a09", "a10", "a11", "n.x00041", "n.x00043", "n.x00044"]),
        ("gpu-a22.cluster.local,x_1-gpu032x", ["gpu-a22.cluster.local", "x_1-gpu032x"]),
        ("a[1][2-3],[7-8],a[01-3]", ["a12", "a13", "7", "8", "a01", "a02", "a03"]),
    ],
)
def test_slurm_host_lists(text: str, hosts: list[str]) -> None:
    """Hosts as `scontrol show hostnames` of Slurm 22.05 prints them; most lists are what `show hostlist` made."""
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a[1-",
        "a[1-3",
        "a[3-1]",
        "a[1,,2]",
        "a]1[",
        "a[1-3:2]",
        "a[x-y]",
        "[a,b]",
        "a[]",
        "a[1-2,]",
        "a[1 -3]",
        "a,,b",
    ]
    + ["a,", ",a", "a [1]", "a b", "a{1..3}", "a(2)", "a;b", "a[[1]]", "a[1]]", "a[-3]", "a[1-2-3]", "a[0-999999999]"]
    + ["a[0-9999][0-9999]", "a[1\n]", "(null)"],
)
def test_slurm_host_lists_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=f"SLURM_JOB_NODELIST={re.escape(repr(text))}"):
        expand_nodelist(text)
