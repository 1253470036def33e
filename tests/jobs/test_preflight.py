"""The pre-flight: verdicts on recorded logs of NCCL, and a real measurement over gloo."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.cluster.profile import ClusterProfile, Preflight
from megatron.errors import LostRankError, StopRequested, UserError
from megatron.jobs.preflight import Findings, check, judge, main, measure, networks_of, table, version_text
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

# NCCL's own lines, shortened to those that matter here.
SLINGSHOT = """\
nid001:4100:4100 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to hsn
nid001:4100:4100 [0] NCCL INFO Bootstrap : Using hsn0:10.253.1.4<0>
NCCL version 2.26.6+cuda12.6
nid001:4100:4177 [0] NCCL INFO NET/OFI Selected Provider is cxi
nid001:4100:4177 [0] NCCL INFO Using network AWS Libfabric
nid002:6200:6277 [0] NCCL INFO Using network AWS Libfabric
nid001:4100:4180 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
"""
TCP = """\
n1:2744870:2744870 [0] NCCL INFO Bootstrap : Using ens7:10.128.0.32<0>
n1:2744870:2744870 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open \
shared object file: No such file or directory
n1:2744870:2745046 [0] NCCL INFO NET/IB : No device found.
n1:2744870:2745046 [0] NCCL INFO NET/Socket : Using [0]ens7:10.128.0.32<0>
n1:2744870:2745046 [0] NCCL INFO Using network Socket
n1:2744870:2745050 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
NOT_FOUND = "n1:7:9 [0] net.cc:345 NCCL WARN Error: network AWS Libfabric not found.\n"
OLD_LIBRARY = "ImportError: /v/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommShrink\n"
WANTED = Preflight(nccl=">=2.26", plugin="AWS Libfabric", bandwidth_gb_s=20.0)
GOOD = Findings("nccl", 22.5, "2.26.6", "/sw/nccl/lib/libnccl.so.2")
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "28123"}


def profile_of(wanted: Preflight) -> ClusterProfile:
    return ClusterProfile("site", Path("site.yml"), preflight=wanted, lines={"preflight": "site.yml:9"})


def problems(wanted: Preflight, found: Findings, output: str) -> dict[str, str]:
    return {row.name: row.problem for row in judge(wanted, found, output) if row.problem}


def srun(folder: Path, script: str) -> dict[str, str]:
    """The variables of a job on three nodes whose `srun` runs this script of the shell."""
    (folder / "srun").write_text(f'#!/bin/bash\necho "$*" > "{folder}/argv"\n{script}\n')
    (folder / "srun").chmod(0o755)
    return JOB | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")  # where a program is looked for
    return tmp_path


def test_the_network_that_nccl_says_it_uses() -> None:
    assert networks_of(SLINGSHOT) == ["AWS Libfabric"] and networks_of(TCP) == ["Socket"]
    assert networks_of(SLINGSHOT + TCP) == ["AWS Libfabric", "Socket"] and networks_of("") == []


def test_verdicts() -> None:
    assert problems(WANTED, GOOD, SLINGSHOT) == {}
    assert problems(Preflight(plugin="IB"), GOOD, "x NCCL INFO Using network IBext_v8\n") == {}
    assert list(problems(WANTED, GOOD, SLINGSHOT + TCP)) == ["network"]  # one of the two nodes fell back
    found = problems(WANTED, GOOD, TCP)
    assert list(found) == ["network"] and "Socket" in found["network"] and "AWS Libfabric" in found["network"]
    assert list(problems(Preflight(bandwidth_gb_s=1), GOOD, TCP)) == ["network"]  # TCP is named where none is wanted
    assert "IB" in problems(Preflight(plugin="AWS Libfabric"), GOOD, "x NCCL INFO Using network IB\n")["network"]
    assert list(problems(WANTED, GOOD, "")) == ["network"]  # an empty log proves nothing
    slow = Findings("nccl", 1.9, "2.9.9", "/lib/libnccl.so.2")
    found = problems(WANTED, slow, SLINGSHOT)
    assert list(found) == ["NCCL", "all-reduce"]
    assert "2.9.9" in found["NCCL"] and "/lib/libnccl.so.2" in found["NCCL"] and "2.26" in found["NCCL"]
    assert "1.9 GB/s" in found["all-reduce"] and "20" in found["all-reduce"]
    assert problems(WANTED, Findings("nccl", 30, "2.26", "/x"), SLINGSHOT) == {}
    assert list(problems(WANTED, Findings("nccl", 30, None, None), SLINGSHOT)) == ["NCCL"]
    assert list(problems(WANTED, Findings("gloo", 0.5), "")) == ["all-reduce"]  # no GPUs: nothing of NCCL


def test_the_table_says_what_was_found() -> None:
    lines = table(judge(WANTED, GOOD, SLINGSHOT))
    assert [line.split()[-1] for line in lines] == ["found", "ok", "ok", "yes", "ok"]
    assert "2.26.6 /sw/nccl/lib/libnccl.so.2" in lines[1] and "22.5 GB/s" in lines[4]
    assert len({line.find("wanted") for line in lines[:1]} | {line.find(">=") for line in (lines[1], lines[4])}) == 1


def test_versions_of_nccl() -> None:
    assert [version_text(code) for code in (22606, 22705, 21003, 2804)] == ["2.26.6", "2.27.5", "2.10.3", "2.8.4"]


def recorded(found: Findings, output: str) -> str:
    return f"cat <<'END'\n{output}preflight: {json.dumps(asdict(found))}\nEND"


def test_a_tcp_fallback_stops_the_job_unless_it_is_allowed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepy")
    check(profile_of(WANTED), srun(path, recorded(GOOD, SLINGSHOT)))
    assert "--nodes=2 --ntasks=2" in (path / "argv").read_text() and "--nodelist=n1,n2" in (path / "argv").read_text()
    env = srun(path, recorded(Findings("nccl", 1.2, "2.27.5", "/x"), TCP))
    with pytest.raises(UserError) as caught:
        check(profile_of(WANTED), env)
    assert all(part in str(caught.value) for part in ("site.yml:9", "TCP", "1.2 GB/s", "DEEPY_PREFLIGHT=warn"))
    for allowed, more in (
        (Preflight(">=2.26", "AWS Libfabric", 20.0, allow_tcp=True), {}),
        (WANTED, {"DEEPY_PREFLIGHT": "warn"}),
    ):
        caplog.clear()
        check(profile_of(allowed), env | more)
        assert sum("TCP" in one.message for one in caplog.records if one.levelname == "WARNING") == 1
    too_old = srun(path, recorded(Findings("nccl", 1.2, "2.20.5", "/x"), TCP))
    with pytest.raises(UserError, match=r"2\.20\.5"):  # TCP is allowed, an old NCCL is not
        check(profile_of(Preflight(">=2.26", "AWS Libfabric", 20.0, allow_tcp=True)), too_old)


def test_what_asks_for_nothing_is_skipped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deepy")
    env = srun(path, "exit 9")
    check(profile_of(Preflight()), env)
    check(profile_of(WANTED), env | {"SLURM_JOB_NODELIST": "n1"})
    check(profile_of(WANTED), env | {"DEEPY_PREFLIGHT": "off"})
    assert len(caplog.records) == 3 and not (path / "argv").exists()
    with pytest.raises(UserError, match="DEEPY_PREFLIGHT=no "):
        check(profile_of(WANTED), env | {"DEEPY_PREFLIGHT": "no"})


def test_failures_are_explained(path: Path) -> None:
    with pytest.raises(UserError, match=r"ncclCommShrink.*nccl: wheel"):
        check(profile_of(WANTED), srun(path, f"echo '{OLD_LIBRARY}'; exit 1"))
    with pytest.raises(UserError, match="AWS Libfabric not found.*NCCL_NET"):
        check(profile_of(WANTED), srun(path, f"echo '{NOT_FOUND}'; exit 1"))
    with pytest.raises(LostRankError, match="(?s)n1 and n2.*code 3.*CUDA error: all CUDA-capable"):
        check(profile_of(WANTED), srun(path, "echo 'CUDA error: all CUDA-capable devices are busy'; exit 3"))
    # it hangs, and ends its processes when it is asked to
    script = f"trap 'touch {path}/ended; exit 1' TERM; echo 'NCCL INFO still'; while :; do sleep 0.05; done"
    with pytest.raises(LostRankError, match=r"(?s)within 0\.5 s.*NCCL INFO still"):
        check(profile_of(WANTED), srun(path, script), seconds=0.5)
    assert (path / "ended").exists()
    with pytest.raises(StopRequested):  # the signal before the time limit reached the processes
        check(profile_of(WANTED), srun(path, "echo 'srun: error: n1: task 0: Terminated'; exit 143"))
    with pytest.raises(UserError, match="srun"):
        check(profile_of(WANTED), JOB | {"PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("variables", "given"),
    [
        ({"SLURM_GPUS_PER_NODE": "gh200:4"}, True),
        ({"SLURM_GPUS_ON_NODE": "2"}, True),
        ({"SLURM_GPUS_PER_NODE": "0", "SLURM_GPUS_ON_NODE": "4"}, False),  # --exclusive brings them, nobody wants them
        ({}, False),
    ],
)
def test_gpus_that_torch_does_not_see_stop_the_job(path: Path, variables: dict[str, str], given: bool) -> None:
    env = srun(path, recorded(Findings("gloo", 0.5), "")) | variables
    wanted = profile_of(Preflight(nccl=">=2.26"))
    if not given:
        return check(wanted, env)
    with pytest.raises(UserError, match=r"site\.yml:9.*[24] GPUs on each node.*torch sees none"):
        check(wanted, env)


def test_the_processes_run_this_deepy_in_the_folder_of_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fork/megatron", "stubs"):
        (path / name).mkdir(parents=True)
    (path / "fork/megatron/__init__.py").write_text("raise SystemExit('another megatron was imported')\n")
    (path / "stubs/torch.py").write_text("raise SystemExit('torch is imported')\n")  # the first thing that it does
    monkeypatch.chdir(path / "fork")
    env = srun(path, 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    with pytest.raises(LostRankError, match="torch is imported"):
        check(profile_of(WANTED), env | {"PYTHONPATH": str(path / "stubs")})


def speed_of(rank: int, world_size: int) -> float:
    return measure("gloo", 2**20, repeats=2)


def test_by_hand_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    monkeypatch.setattr("sys.argv", ["preflight"])
    with pytest.raises(UserError, match="SLURM_PROCID"):
        main()
    monkeypatch.setattr("sys.argv", ["preflight", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()


def test_a_real_all_reduce_is_measured() -> None:
    """tests/cluster/real has the whole, with processes that srun starts."""
    first, second = run_distributed(speed_of, 2, timeout=60)
    assert 1e-4 < first < 100 and 0.2 < first / second < 5  # of this machine's memory; both saw the same
