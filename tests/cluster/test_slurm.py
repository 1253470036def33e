"""SLURM's commands as functions, with stand-ins that print what SLURM 22.05 printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.cluster.slurm import Slurm, SlurmError, parse_fields

pytestmark = pytest.mark.cpu
SHOWN = (
    "JobId=12 JobName=my run UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0 TRES=cpu=2,node=2,billing=2,gres/gpu=4 "
    "Command=/work/a folder/pretrain_neox.sbatch run.yml lr=3 WorkDir=/work StdOut=/work/my run-12.out Power="
)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    programs = {
        "sbatch": "echo 'sbatch: note' >&2; echo '17;cluster_a'",
        "squeue": "printf '17\\037a|b\\037me\\037main\\037PENDING\\037Priority\\0372\\037\\0370:00\\0371:00\\037N/A"
        "\\037/w\\037/w/a.sh\\037gres:gpu:4\\037lab\\037(null)\\037(null)\\n'",
        "scontrol": f"echo '{SHOWN}'",
        "sacct": "echo '17|x|7:0'",
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
    assert (row["job_id"], row["name"], row["nodes"], row["gres"]) == ("17", "a|b", "2", "gres:gpu:4")
    assert slurm.accounting(fields=("JobID", "JobName", "ExitCode")) == [
        {"JobID": "17", "JobName": "x", "ExitCode": "7:0"}
    ]


def test_what_fails_or_hangs_is_an_error(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.env is not None
    monkeypatch.setenv("PATH", slurm.env["PATH"])
    with pytest.raises(SlurmError, match="broken"):
        slurm.run("sreport")
    with pytest.raises(SlurmError, match="0.2 s"):
        Slurm(seconds=0.2).run("sinfo")
    with pytest.raises(SlurmError, match="no_such"):
        slurm.run("no_such_program")
    with pytest.raises(SlurmError, match="3 fields instead of 15"):
        slurm.accounting()
