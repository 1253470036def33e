"""SLURM's commands as functions, with stand-ins that print what SLURM 22.05 printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.cluster.slurm import Slurm, SlurmError, count_gpus, environment_for_next, parse_fields, parse_time

pytestmark = pytest.mark.cpu
SHOWN = (
    "JobId=12 JobName=my run UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 TRES=cpu=2,node=2,billing=2,gres/gpu=4 "
    "Command=/work/a folder/pretrain_neox.sbatch run.yml lr=3 WorkDir=/work StdOut=/work/my run-12.out Power="
)
QUEUED = r"\037".join(
    [
        "17",
        "17",
        "a|b",
        "me",
        "lab",
        "main",
        "PENDING",
        "Priority",
        "2",
        "-",
        "0:00",
        "1:00",
        "N/A",
        "cpu=2,node=2,gres/gpu=8",
        "0",
        "/w",
        "/w/a.sh",
    ]
    + ["/w/a b.out", "(null)", "(null)", r"\n"]
)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    programs = {
        "sbatch": "echo 'sbatch: note' >&2; echo '17;cluster_a'",
        "squeue": f"printf '{QUEUED}'",
        "scontrol": f"echo '{SHOWN}'",
        "sacct": "printf '17\\037x|y\\0377:0\\n'",
        "sinfo": "sleep 60",
        "sreport": "echo broken >&2; exit 3",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return Slurm(seconds=5.0, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def test_fields_keep_blanks_and_equal_signs() -> None:
    fields = parse_fields(SHOWN)
    assert (fields["JobName"], fields["Restarts"], fields["Power"]) == ("my run", "2", "")
    assert fields["Command"] == "/work/a folder/pretrain_neox.sbatch run.yml lr=3"
    assert fields["TRES"] == "cpu=2,node=2,billing=2,gres/gpu=4"
    assert fields["StdOut"] == "/work/my run-12.out"


def test_commands_give_values(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.env is not None
    monkeypatch.setenv("PATH", slurm.env["PATH"])
    assert slurm.submit("a.sh") == "17"
    assert slurm.job("12")["JobState"] == "RUNNING"
    row = slurm.queue()[0]
    assert (row["job_id"], row["name"], row["nodes"], row["output"]) == ("17", "a|b", "2", "/w/a b.out")
    assert count_gpus(row["tres"]) == 8
    assert slurm.accounting(fields=("JobID", "JobName", "ExitCode")) == [
        {"JobID": "17", "JobName": "x|y", "ExitCode": "7:0"}
    ]


@pytest.mark.parametrize(
    "answer",
    ["17", "17;cluster_a", "quota: 100\nSubmitted batch job 17", "Submitted batch job 17 on cluster a", "17\nbye"],
)
def test_a_site_s_wrapper_of_sbatch(tmp_path: Path, answer: str) -> None:
    """One that does not know --parsable has queued the job: an error would let it be submitted again."""
    program = tmp_path / "site sbatch"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/given\necho '{answer}'\n")
    program.chmod(0o755)
    assert Slurm().submit("a.sh", command=f"'{program}' --check") == "17"
    assert (tmp_path / "given").read_text() == "--check --parsable a.sh\n"
    program.write_text("#!/bin/sh\necho job 17 perhaps\n")
    with pytest.raises(SlurmError, match="job 17 perhaps"):
        Slurm().submit("a.sh", command=f"'{program}' --check")


def test_nothing_of_this_job_reaches_the_environment_of_the_next() -> None:
    ours = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURMD_NODENAME": "a1", "CUDA_VISIBLE_DEVICES": "0"}
    ours |= {"WANDB_SERVICE": "/tmp/x", "OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0"}
    ours |= {"MASTER_ADDR": "a1", "MASTER_PORT": "29501", "SLURM_JOB_END_TIME": "9"}
    users = {"HOME": "/home/you", "SLURM_CONF": "/etc/slurm.conf", "MAX_JOB_CHAINS": "9", "DEEPY_CLUSTER": "x"}
    users |= {"SLURM_JOB_CHAIN_COUNT": "3"}
    assert environment_for_next({**ours, **users}) == users
    shared = environment_for_next({**ours, **users}, devices=True)
    assert shared == {**users, "CUDA_VISIBLE_DEVICES": "0"}


def test_what_fails_or_hangs_is_an_error(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.env is not None
    monkeypatch.setenv("PATH", slurm.env["PATH"])
    with pytest.raises(SlurmError, match="broken"):
        slurm.run("sreport")
    with pytest.raises(SlurmError, match="0.2 s"):
        Slurm(seconds=0.2).run("sinfo")
    with pytest.raises(SlurmError, match="no_such"):
        slurm.run("no_such_program")
    with pytest.raises(SlurmError, match="3 fields instead of 16"):
        slurm.accounting()


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("cpu=8,node=2,gres/gpu=8,gres/gpu:a100=8", 8),
        ("gpu:gh200:4(S:0-3)", 4),
        ("gpu:4(IDX:0-3)", 4),
        ("gpu:a100:2,gpu:h100:1", 3),
        ("gres:gpu:4", 4),
        ("gres/gpu:a100=4", 4),
        ("gres/gpu:4", 4),
        ("cpu=4,mem=4000M", 0),
        ("(null)", 0),
    ],
)
def test_gpus_in_slurm_s_texts(text: str, gpus: int) -> None:
    assert count_gpus(text) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("2:30", 150),
        ("2:00:05", 7205),
        ("1-12", 129600),
        ("1-00:30", 88200),
        ("7-00:00:00", 604800),
        ("0", None),
        ("infinite", None),
        ("UNLIMITED", None),
        ("n/a", None),
    ],
)
def test_times_of_slurm(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


def test_the_limit_of_a_job_is_that_of_its_partitions(tmp_path: Path) -> None:
    for given, printed, seconds in (
        (None, "a 1:00\nb* 5:00\n", 300),
        ("a,b", "a 1:00\nb* infinite\n", 60),
        (None, "", None),
    ):
        (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf '{printed}'\n")
        (tmp_path / "sinfo").chmod(0o755)
        assert Slurm(env={"PATH": str(tmp_path)}).time_limit(given) == seconds
