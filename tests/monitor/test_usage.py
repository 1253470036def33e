"""--cluster and --usage, from recorded answers of SLURM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cluster.slurm import Slurm
from megatron.errors import UserError
from megatron.monitor.cli import main
from megatron.monitor.usage import Share, read_cluster, read_usage
from megatron.monitor.usage_text import cluster_lines
from tests.monitor.slurm_texts import install

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]
# sreport --parsable2 of two reports
BY_USER = """\
root||4010
lab||4000
lab|me|1000
lab|you|3000
lab/sub|me|10
"""
UTILIZATION = "first|gres/gpu|4010|240|0|3750|0|8000\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    install(tmp_path / "bin")
    (tmp_path / "bin/sreport").write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$*" in *Utilization\\ *) printf \'{UTILIZATION}\' ;; '
        f"*) printf '{BY_USER}' ;; esac\n"
    )
    (tmp_path / "bin/sreport").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return Slurm()


def test_who_uses_the_cluster(slurm: Slurm) -> None:
    use = read_cluster(slurm, "me")
    pool = use.nodes
    assert (pool.total, pool.idle, pool.down) == (Share(7, 28), Share(1, 6), Share(2, 8))
    assert (pool.mixed.nodes, pool.allocated) == (3, Share(1, 14))
    assert pool.idle.gpus + pool.allocated.gpus + pool.down.gpus == pool.total.gpus
    assert use.partitions["low"].total == Share(4, 16) and list(use.partitions) == ["main", "low"]
    assert use.running == {"me": Share(2, 8, 1), "you": Share(1, 2, 1)}
    assert use.pending == {"me": Share(7, 17, 4)}
    assert use.by_partition == {"main": use.running}
    assert [job["job_id"] for job in use.jobs] == ["1038", "1040", "1041", "1042", "1043_0"]


def test_hours_by_user_and_account(slurm: Slurm, tmp_path: Path) -> None:
    usage = read_usage(slurm, "me", "2026-06-01", "now")
    assert usage.users == {"you": 3000.0, "me": 1010.0}  # without the sums of accounts
    assert usage.accounts == {"lab": 4000.0, "lab/sub": 10.0}
    assert usage.utilization["idle"] == 3750.0 and usage.utilization["reported"] == 8000.0
    assert (tmp_path / "asked").read_text().count("start=2026-06-01 end=now --tres=gres/gpu") == 2


def test_a_time_that_sreport_does_not_understand(slurm: Slurm, tmp_path: Path) -> None:
    """It says so, reports on yesterday instead, and ends with 0."""
    (tmp_path / "bin/sreport").write_text(
        f"#!/bin/sh\necho 'Invalid time specification (pos=0): foo' >&2\nprintf '{BY_USER}'\n"
    )
    with pytest.raises(UserError, match="--usage foo now: "):
        main(["--usage", "foo"], {})


def typed(command: str, folder: Path) -> str:
    environment = {**os.environ, "USER": "me", "LOGNAME": "me"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_that_users_of_neox_type(slurm: Slurm, tmp_path: Path) -> None:
    """`bash tools/cluster/cluster_status.sh`, from any folder."""
    status = typed(f"bash {ROOT}/tools/cluster/cluster_status.sh", tmp_path)
    assert "me runs on 8 of 28 GPUs (28.6% of the cluster, 57.1% of what is allocated)" in status
    assert any(line.split() == ["down", "2", "8", "28.6%"] for line in status.splitlines())
    assert "DependencyNeverSatisfied" in status
    usage = typed(f"bash {ROOT}/tools/cluster/cluster_usage.sh 2026-06-01 2026-07-01", tmp_path)
    assert "me: 1,010 GPU hours (42.1 days), place 2 of 2" in usage and "2026-07-01" in usage
    assert any(line.split() == ["1", "you", "3,000", "125.0", "74.8%"] for line in usage.splitlines())
    typed(f"bash {ROOT}/tools/cluster/cluster_usage.sh", tmp_path)
    assert "start=2025-01-01 end=now" in (tmp_path / "asked").read_text()
    both = json.loads(typed(f"{sys.executable} {ROOT}/slurm/monitor.py --cluster --usage --json", tmp_path))
    assert both["cluster"]["running"]["me"] == {"nodes": 2, "gpus": 8, "jobs": 1}
    assert both["usage"]["users"] == {"you": 3000.0, "me": 1010.0}


def test_names_that_look_like_markup(slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job may be called anything."""
    text = (Path(__file__).parent / "slurm/squeue.txt").read_text().replace(";held;", ";[bold]x[/y];")
    install(tmp_path / "bin", {"squeue": text})
    assert "[bold]x[/y]" in "\n".join(cluster_lines(read_cluster(slurm, "me")))
    assert main(["--user", "me"], {}) == 0
    assert "[bold]x[/y]" in capsys.readouterr().out
