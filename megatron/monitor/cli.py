"""`slurm/monitor.py`: flags, and what is printed."""

from __future__ import annotations

import argparse
import getpass
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.live import Live
from rich.text import Text

from megatron.cluster.profile import find_profile
from megatron.cluster.slurm import Slurm
from megatron.errors import UserError
from megatron.flags import Parser
from megatron.log import configure, get_logger
from megatron.monitor.collect import Selection, View, has_slurm, look, select
from megatron.monitor.rows import Row
from megatron.monitor.table import make_console, make_table, plain_lines
from megatron.monitor.usage import read_cluster, read_usage
from megatron.monitor.usage_text import cluster_lines, usage_lines
from megatron.monitor.wait import Waiting, await_iterations

logger = get_logger(__name__)

VERSION = 1
_EVERY = 10.0
_DESCRIPTION = """One table of all runs: those of SLURM jobs and those without one.

    python slurm/monitor.py                                 my jobs, and the runs in the folder of checkpoints
    python slurm/monitor.py --watch                         the same, again every 10 seconds
    python slurm/monitor.py 4007 runs/small --json          a job and a run folder, for programs
    python slurm/monitor.py --wait-iterations 50 4007       returns 0 when the job has trained 50 iterations
    python slurm/monitor.py --cluster                       who uses the cluster now
    python slurm/monitor.py --usage 2026-06-01 now          GPU hours by user and account

Runs are looked for where the cluster profile (DEEPY_CLUSTER) has its checkpoints and logs, else in ./checkpoints and
./runs; jobs are asked from SLURM where it is installed. What has ended is shown when it ended badly within a day.

Exit codes of --wait-iterations: 0 trained that far, 1 failed or hangs, 2 wrong input, 3 ended before without a
failure, 4 can never start, 6 SLURM gave no answer for two minutes from the beginning, 124 --timeout passed."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The command; returns its exit code."""
    given = parser().parse_args(argv)
    configure()
    slurm, me = Slurm(), getpass.getuser()
    if given.cluster or given.usage is not None:
        return _print_usage(given, slurm, me)
    user = None if given.user == "all" else given.user or me
    selection = select(given.what, user, given.all, find_profile(env), env)
    if given.wait_iterations is not None:
        return _wait(given, selection, slurm)
    view = look(selection, slurm, _host())
    if view.unknown:
        where = "neither SLURM nor a run folder knows it" if has_slurm(slurm) else "no run folder names it"
        raise UserError(f"{', '.join(view.unknown)}: no such job: {where}")
    if given.watch is None:
        _print(view, given.json)
        return 0
    try:
        _watch(selection, slurm, given.watch, given.json)
    except KeyboardInterrupt:
        return 0
    return 0


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=_DESCRIPTION)
    flags.add_argument("what", nargs="*", metavar="JOB|FOLDER", help="numbers of jobs and run folders; default: all")
    flags.add_argument("--json", action="store_true", help="one JSON object instead of a table (slurm/README.md)")
    flags.add_argument(
        "--watch",
        nargs="?",
        type=_positive,
        const=_EVERY,
        metavar="SECONDS",
        help="show it again every SECONDS (10) until Ctrl-C; with --wait-iterations: look that often",
    )
    flags.add_argument("--all", action="store_true", help="also what has ended; of jobs, within 30 days")
    flags.add_argument("--user", metavar="NAME", help="whose jobs (default: yours); all: everybody's")
    flags.add_argument(
        "--wait-iterations",
        type=int,
        metavar="N",
        help="wait until the JOB, or the run in FOLDER, has trained N iterations since it was started",
    )
    flags.add_argument("--timeout", type=_positive, metavar="SECONDS", help="of --wait-iterations (default: none)")
    flags.add_argument("--cluster", action="store_true", help="nodes, GPUs and jobs by partition and user")
    flags.add_argument(
        "--usage",
        nargs="*",
        metavar=("START", "END"),
        help="GPU hours from START (default: 30 days ago) to END (now): dates, or what sreport takes, as now-7days",
    )
    return flags


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number of seconds")
    return value


def _host() -> str:
    return socket.gethostname()


def _as_json(view: View) -> str:
    found = {"version": VERSION, "time": view.time, "notes": view.notes, "runs": [row.to_json() for row in view.rows]}
    return json.dumps(found)


def _print(view: View, as_json: bool) -> None:
    if as_json:
        print(_as_json(view), flush=True)
        return
    _warn(view)
    if not view.rows and view.notes:
        print("no runs; SLURM, which knows the jobs, could not be asked", flush=True)
    elif not view.rows:
        print("no runs and no jobs (--all: also those that have ended)", flush=True)
    elif sys.stdout.isatty():
        console = make_console()
        console.print(make_table(view.rows, console.width, plain=False))
    else:
        print("\n".join(plain_lines(make_table(view.rows, 0, plain=True))), flush=True)


def _warn(view: View) -> None:
    for note in view.notes:
        logger.warning(note)


def _watch(selection: Selection, slurm: Slurm, seconds: float, as_json: bool) -> None:
    if as_json or not sys.stdout.isatty():
        while True:
            view = look(selection, slurm, _host())
            if not as_json:
                print(time.strftime("%Y-%m-%d %H:%M:%S"))
            _print(view, as_json)
            time.sleep(seconds)
    console = make_console()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            view = look(selection, slurm, _host())
            ended = f"every {seconds:g} s, Ctrl-C ends; {len(view.rows)} runs"
            notes = Text("; ".join([time.strftime("%H:%M:%S"), ended, *view.notes]))
            table = Group(make_table(view.rows, console.width, plain=False), notes)
            live.update(table, refresh=True)
            time.sleep(seconds)


def _wait(given: argparse.Namespace, selection: Selection, slurm: Slurm) -> int:
    if len(given.what) != 1 or given.wait_iterations < 1:
        raise UserError(
            "--wait-iterations N JOB: N from 1 on, and one job or run folder, as in: --wait-iterations 50 4007"
        )
    last: list[Row] = []

    def look_once() -> tuple[list[Row], list[str]]:
        view = look(selection, slurm, _host())
        last[:] = view.rows
        return view.rows, view.notes

    code, reason = await_iterations(
        look_once,
        given.what[0],
        Waiting(given.wait_iterations),
        timeout=given.timeout,
        interval=given.watch or _EVERY,
        tell=logger.info,
    )
    if given.json:
        runs = [row.to_json() for row in last]
        print(json.dumps({"version": VERSION, "time": time.time(), "code": code, "reason": reason, "runs": runs}))
    else:
        print(reason, flush=True)
    return code


def _print_usage(given: argparse.Namespace, slurm: Slurm, me: str) -> int:
    if not has_slurm(slurm):
        raise UserError(
            "--cluster and --usage ask SLURM, whose commands (squeue, sinfo, sreport) are not installed here"
        )
    if given.what or len(given.usage or ()) > 2:
        raise UserError(
            f"--cluster and --usage [START] [END] take nothing else: {' '.join([*given.what, *(given.usage or ())])}"
        )
    found: dict[str, object] = {"version": VERSION, "time": time.time()}
    lines: list[str] = []
    user = given.user or me
    if given.cluster:
        use = read_cluster(slurm, user)
        found["cluster"] = use.to_json()
        lines += cluster_lines(use)
    if given.usage is not None:
        dates: list[str] = given.usage
        start, end = [*dates, *("now-30days", "now")[len(dates) :]]
        usage = read_usage(slurm, user, start, end)
        found["usage"] = usage.to_json()
        lines += [*([""] if lines else []), *usage_lines(usage)]
    print(json.dumps(found) if given.json else "\n".join(lines), flush=True)
    return 0
