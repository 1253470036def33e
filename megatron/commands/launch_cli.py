"""What starts runs, or plans them: `deepy.py`, and the sub-commands train, plan, eval, generate."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron import log, signals
from megatron.api import start
from megatron.cluster.command_line import launcher_parser, parse_launcher_command_line
from megatron.cluster.launch import command_preview, ranks_of_hostfile
from megatron.home import HOME
from megatron.neox_arguments.problems import collector
from megatron.plan.preflight import explain, load, read_config


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, then explain, plan or launch. Imports neither torch nor deepspeed: this has to be quick."""
    signals.raise_stop_requests()
    log.configure(level=os.environ.get("LOGLEVEL", "INFO"))
    name = Path(sys.argv[0]).name
    given = list(sys.argv[1:] if argv is None else argv)
    if is_ours := name.startswith("deepy "):
        given[0] = str(HOME / given[0])  # not another program's of that name, in the folder of the call
    line = parse_launcher_command_line(given, name if is_ours else "deepy.py")
    if not (line.explain or line.prepare or line.dry_run):
        return start(line.user_script, line.paths, line.overrides)
    if line.explain:
        args = read_config(line.paths, line.overrides, line.user_script)
        print("\n".join(explain(args, key, os.environ) for key in line.explain))
    elif line.prepare:
        from megatron.plan.prepare import prepare

        with collector() as problems:
            args = read_config(line.paths, line.overrides, line.user_script, problems)
            print(prepare(args, ranks_of_hostfile(args, os.environ), line.user_script, problems))
    else:
        from megatron.plan.planner import plan

        with collector() as problems:  # raises what the run would lack after the plan of the rest is printed
            args, placement = load(line.paths, line.overrides, line.user_script, os.environ, problems)
            command = command_preview(line.user_script, args, placement, os.environ) if placement else None
            print(plan(args, placement, line.user_script, command, problems))
    return 0


parser = launcher_parser
