"""What a job checks between two of its nodes before it trains: whether NCCL is the one the profile wants and has found
its network, and how fast an all-reduce is. A silent fallback to TCP would cost most of the job's speed.

A process on each of the two nodes, started by srun, reports what it loaded and measured; NCCL's own log says which
network it uses. Without GPUs the measurement is gloo's and there is no NCCL to check.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.cluster.launch import node_address
from megatron.cluster.launchers import RUN_MODULE, expand_nodelist
from megatron.cluster.profile import ClusterProfile, Preflight
from megatron.errors import LostRankError, StopRequested, UserError, run_cli
from megatron.flags import Parser
from megatron.jobs.environment import given_gpus, missing_symbol
from megatron.log import get_logger
from megatron.signals import STOP_SIGNALS

logger = get_logger(__name__)

SWITCH = "DEEPY_PREFLIGHT"
_MODES = ("check", "warn", "off")
_SECONDS = 300  # for starting two processes that import torch from a busy file system, and measuring
_REPEATS = 5
_BYTES = {"nccl": 256 * 2**20, "gloo": 16 * 2**20}
_TCP = "Socket"  # NCCL's name for it
_MARK = "preflight: "
_STOPPED = {128 + number for number in STOP_SIGNALS}


@dataclass(frozen=True)
class Findings:
    """What the first of the two processes reports. `gb_s`: 10^9 bytes a second of each node's part of an all-reduce."""

    backend: str
    gb_s: float
    nccl: str | None = None
    library: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table. `problem`: what is wrong and what to do; `tcp`: it is one of a job over TCP only."""

    name: str
    wanted: str
    found: str
    problem: str | None = None
    tcp: bool = False


def check(profile: ClusterProfile, env: Mapping[str, str], *, seconds: float = _SECONDS) -> None:
    """Check two nodes of this SLURM job against `profile.preflight`, and log a table.

    `DEEPY_PREFLIGHT=warn` only warns of what is wrong, `off` skips it. Raises `UserError` for what is not as the
    profile wants it, `LostRankError` when the two nodes do not meet.
    """
    wanted, mode = profile.preflight, env.get(SWITCH) or "check"
    if mode not in _MODES:
        raise UserError(f"{SWITCH}={mode} is not one of {', '.join(_MODES)}")
    hosts = expand_nodelist(env["SLURM_JOB_NODELIST"]) if env.get("SLURM_JOB_NODELIST") else []
    if (reason := _reason_to_skip(wanted, mode, hosts)) is not None:
        logger.info(f"pre-flight: skipped: {reason}")
        return
    output = _run(hosts[:2], env, seconds)
    rows = judge(wanted, _findings(output, hosts[:2]), output, given_gpus(env))
    where = profile.lines.get("preflight", str(profile.path))
    problems = [row.problem for row in rows if row.problem and not (row.tcp and wanted.allow_tcp)]
    for line in (f"pre-flight on {hosts[0]} and {hosts[1]} ({where})", *table(rows)):
        logger.info(line)
    for row in rows:
        if row.problem and row.problem not in problems:
            logger.warning(f"pre-flight: {row.problem} (preflight.allow_tcp)")
    if problems and mode == "check":
        raise UserError(f"{where}: preflight: {'; '.join(problems)}. To train all the same: {SWITCH}=warn")
    for problem in problems:
        logger.warning(f"pre-flight: {problem}")


def _reason_to_skip(wanted: Preflight, mode: str, hosts: Sequence[str]) -> str | None:
    if mode == "off":
        return f"{SWITCH}=off"
    if wanted.nccl is wanted.plugin is wanted.bandwidth_gb_s is None:
        return "the cluster's profile demands nothing"
    return "the job has one node" if len(hosts) < 2 else None


# ---- what was found against what is wanted


def judge(wanted: Preflight, found: Findings, output: str, gpus: int = 0) -> list[Row]:
    """The table of a pre-flight: `output` is the log of NCCL (`NCCL_DEBUG=INFO`) of both processes, `gpus` the number
    on each node of the job."""
    if found.backend != "nccl" and gpus:
        problem = (
            f"the job has {gpus} GPUs on each node, but torch sees none: is it built for CPUs only, is the driver too "
            "old for it, or does CUDA_VISIBLE_DEVICES hide them? (On the CPUs: sbatch --gpus-per-node=0)"
        )
        return [Row("GPUs", str(gpus), "0", problem), _bandwidth(wanted, found, "gloo", on_tcp=False)]
    if found.backend != "nccl":
        return [Row("NCCL", "", "not in use: the job has no GPUs"), _bandwidth(wanted, found, "gloo", on_tcp=False)]
    rows, networks = [], networks_of(output)
    older = wanted.nccl is not None and _numbers(found.nccl or "0") < _numbers(wanted.nccl)
    too_old = (
        f"NCCL {found.nccl} ({found.library}) was loaded, older than {wanted.nccl}: load another module or set `nccl`"
    )
    rows.append(Row("NCCL", wanted.nccl or "", f"{found.nccl} {found.library}", too_old if older else None))
    shown, on_tcp = ", ".join(networks) or "none named in NCCL's log", _TCP in networks
    problem = None
    if on_tcp:
        problem = (
            f"NCCL uses TCP ({_TCP}), not {wanted.plugin or 'a fast network'}: training would be many times slower"
        )
        problem += ". Is the plug-in's module loaded, and does it fit this NCCL?"
    elif wanted.plugin is not None and not networks or any((wanted.plugin or "") not in name for name in networks):
        problem = f"NCCL uses {shown}, not {wanted.plugin}"
    rows.append(Row("network", wanted.plugin or "", shown, problem, on_tcp))
    if networks and not on_tcp:
        rows.append(Row("GPU direct", "", "yes" if "/GDRDMA" in output else "no"))
    return [*rows, _bandwidth(wanted, found, shown, on_tcp)]


def _bandwidth(wanted: Preflight, found: Findings, network: str, on_tcp: bool) -> Row:
    limit = wanted.bandwidth_gb_s
    slow = limit is not None and found.gb_s < limit
    problem = (
        f"an all-reduce between two nodes reaches {found.gb_s:.3g} GB/s over {network}, less than {limit:g}"
        if slow
        else None
    )
    return Row(
        "all-reduce", f">={limit:g} GB/s" if limit is not None else "", f"{found.gb_s:.3g} GB/s", problem, on_tcp
    )


def networks_of(output: str) -> list[str]:
    """Names of the networks that NCCL's log says are in use, each once."""
    found = re.findall(r"NCCL INFO Using network (.+?)\s*$", output, re.MULTILINE)
    found += re.findall(r"NCCL INFO .* via NET/(.+?)/\d", output)
    return list(dict.fromkeys(found))


def table(rows: Sequence[Row]) -> list[str]:
    """The rows in columns."""
    cells = [("", "wanted", "found"), *((row.name, row.wanted or "-", row.found) for row in rows)]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    verdicts = ["", *("NOT AS WANTED" if row.problem else "ok" if row.wanted else "" for row in rows)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(cell, widths)) for cell in cells]
    return [f"  {line}  {verdict}".rstrip() for line, verdict in zip(lines, verdicts)]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


# ---- starting the two processes


def _run(hosts: Sequence[str], env: Mapping[str, str], seconds: float) -> str:
    """The output of a process on each of `hosts`. Raises for one that failed."""
    address = env.get("MASTER_ADDR") or node_address(hosts[0], in_slurm=True) or hosts[0]
    port = int(env.get("MASTER_PORT") or 29500) + 1000  # the run's own is still free when it starts
    command = ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
    command += ["--kill-on-bad-exit=1", "--export=ALL"]
    command += [sys.executable, "-u", str(RUN_MODULE), "megatron.jobs.preflight"]
    variables = {**env, "MASTER_ADDR": address, "MASTER_PORT": str(port), "NCCL_DEBUG": "INFO"}
    variables |= {"NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
    variables.pop("NCCL_DEBUG_FILE", None)
    logger.info(f"pre-flight: {shlex.join(command)}")
    try:
        process = subprocess.Popen(
            command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    except OSError as error:
        raise UserError(f"pre-flight: srun cannot be run: {error.strerror}. {SWITCH}=off skips it") from error
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired as error:
        raise _failure(_end(process), hosts, f"nothing was measured within {seconds:g} s") from error
    except BaseException:
        _end(process)
        raise
    if process.returncode in _STOPPED:  # SLURM sends the signal of the time limit to the ranks, which these are
        raise StopRequested("a signal ended the pre-flight; is the time limit of the job near?")
    if process.returncode != 0:
        raise _failure(output, hosts, f"srun ended with code {process.returncode}")
    return output


def _end(process: subprocess.Popen[str]) -> str:
    """Have srun end its processes on the nodes too, which SIGKILL would leave; what they have printed."""
    process.terminate()
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _failure(output: str, hosts: Sequence[str], what: str) -> UserError | LostRankError:
    """What a failed measurement means."""
    if (problem := missing_symbol(output, f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}")) is not None:
        return UserError(f"pre-flight: {problem}")
    if missing := re.search(r"NCCL WARN .*(?:network .* not found|initialize any NET plugin).*", output, re.IGNORECASE):
        return UserError(
            f"pre-flight: NCCL did not find its network: {missing[0].strip()}. Is the plug-in's module loaded, and "
            "does it fit this NCCL? NCCL_NET names the network"
        )
    last = "\n  ".join(line for line in output.splitlines()[-12:])
    return LostRankError(f"pre-flight between {' and '.join(hosts)}: {what}:\n  {last}\n{SWITCH}=off skips it")


def _findings(output: str, hosts: Sequence[str]) -> Findings:
    for line in output.splitlines():
        if line.startswith(_MARK):
            return Findings(**json.loads(line.removeprefix(_MARK)))
    raise _failure(output, hosts, "no measurement was reported")


# ---- in the two processes


def measure(backend: str, size: int, repeats: int = _REPEATS) -> float:
    """GB/s of an all-reduce of `size` bytes between the two processes of the default group (bus bandwidth)."""
    import torch
    import torch.distributed as dist

    device = "cuda" if backend == "nccl" else "cpu"
    tensor = torch.ones(size // 4, dtype=torch.float32, device=device)
    for _ in range(2):  # connections are made at the first
        dist.all_reduce(tensor)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    _synchronize(device)
    seconds, ranks = (time.perf_counter() - start) / repeats, dist.get_world_size()
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def _synchronize(device: str) -> None:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier(device_ids=[torch.cuda.current_device()] if device == "cuda" else None)


def loaded_nccl() -> tuple[str | None, str | None]:
    """(version, path) of the NCCL library in this process; None without one."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = re.findall(r"\s(/\S*libnccl\.so\S*)$", maps, re.MULTILINE)
    if not paths:
        return None, None
    code = ctypes.c_int()
    if ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(code)) != 0:
        return None, paths[0]
    return version_text(code.value), paths[0]


def version_text(code: int) -> str:
    """`22606` -> `2.26.6`, and `2804` -> `2.8.4`: NCCL counts in other units since 2.9."""
    unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


def main() -> None:
    Parser(prog="python -m megatron.jobs.preflight", description=__doc__).parse_args()
    import torch
    import torch.distributed as dist

    if "SLURM_PROCID" not in os.environ:
        raise UserError("preflight: SLURM_PROCID is not set: a job starts this by srun, on two of its nodes")
    rank = int(os.environ["SLURM_PROCID"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if backend == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    speed = measure(backend, _BYTES[backend])
    if rank == 0:
        sys.stdout.write(_MARK + json.dumps(asdict(Findings(backend, speed, *loaded_nccl()))) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
