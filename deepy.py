#!/usr/bin/env python
"""Start a script on every rank with the merged config: `python deepy.py train.py a.yml b.yml key=value`. See --help.

`import deepy` gives the same as functions: deepy.train(["a.yml", "b.yml"], key=value); documentation/python_api.md."""

from __future__ import annotations

import os
import sys

from megatron import signals

if __name__ == "__main__":
    signals.ExitAtStop()  # one may come during the other imports

from megatron import log
from megatron.api import evaluate, export_to_hf, generate, import_from_hf, load_config, start, train
from megatron.cluster.command_line import parse_launcher_command_line
from megatron.cluster.launch import command_preview, ranks_of_hostfile
from megatron.errors import run_cli
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.problems import collector
from megatron.plan.preflight import config_for, explain, load

__all__ = ["evaluate", "export_to_hf", "generate", "import_from_hf", "load_config", "train"]


def main() -> int:
    """Parse, check, then explain, plan or launch. Imports neither torch nor deepspeed: this has to be quick."""
    signals.raise_stop_requests()
    log.configure(level=os.environ.get("LOGLEVEL", "INFO"))
    line = parse_launcher_command_line(sys.argv[1:])
    if not (line.explain or line.prepare or line.dry_run):
        return start(line.user_script, line.paths, line.overrides)
    if line.explain:
        args = config_for(NeoXArgs.from_files(line.paths, line.overrides), line.user_script)
        print("\n".join(explain(args, key, os.environ) for key in line.explain))
    elif line.prepare:
        from megatron.plan.prepare import prepare

        with collector() as problems:
            args = config_for(NeoXArgs.from_files(line.paths, line.overrides, problems=problems), line.user_script)
            print(prepare(args, ranks_of_hostfile(args, os.environ), line.user_script, problems))
    else:
        from megatron.plan.planner import plan

        with collector() as problems:  # raises what the run would lack after the plan of the rest is printed
            args, placement = load(line.paths, line.overrides, line.user_script, os.environ, problems)
            command = command_preview(line.user_script, args, placement, os.environ) if placement else None
            print(plan(args, placement, line.user_script, command, problems))
    return 0


if __name__ == "__main__":
    run_cli(main, is_run=True)
