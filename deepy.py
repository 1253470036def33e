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
from megatron.cluster.launch import command_preview, place, ranks_of_hostfile
from megatron.errors import UserError, run_cli
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.plan.preflight import config_for

__all__ = ["evaluate", "export_to_hf", "generate", "import_from_hf", "load_config", "train"]


def main() -> int:
    """Parse, check, then explain, plan or launch. Imports neither torch nor deepspeed: this has to be quick."""
    signals.raise_stop_requests()
    log.configure(level=os.environ.get("LOGLEVEL", "INFO"))
    line = parse_launcher_command_line(sys.argv[1:])
    args = config_for(NeoXArgs.from_files(line.paths, line.overrides), line.user_script)
    if line.explain:
        print("\n".join(explain(args, key) for key in line.explain))
    elif line.prepare:
        from megatron.plan.prepare import prepare

        print(prepare(args, ranks_of_hostfile(args, os.environ), line.user_script))
    elif line.dry_run:
        from megatron.plan.planner import plan

        placement = place(args, os.environ)
        print(plan(args, placement, line.user_script, command_preview(line.user_script, args, placement, os.environ)))
    else:
        return start(line.user_script, args)
    return 0


def explain(args: NeoXArgs, key: str) -> str:
    """What `--explain KEY` prints: with derived values; for a config that is not complete, without them."""
    try:
        return derive(args, Facts(num_devices=place(args, os.environ).world_size)).explain(key)
    except UserError as error:
        return f"{args.explain(key)}\n  (the config is not complete: {error})"


if __name__ == "__main__":
    run_cli(main, is_run=True)
