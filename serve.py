#!/usr/bin/env python
"""What every rank runs to serve a model over HTTP. Usually started by deepy.py; torchrun works as well."""

from __future__ import annotations

import sys
from functools import partial

from megatron.cluster.command_line import parse_rank_command_line
from megatron.cluster.rank import prepare_rank
from megatron.errors import run_cli
from megatron.signals import ExitAtStop


def main() -> int:
    """Join the job, load the model, answer requests."""
    ExitAtStop()
    paths, overrides, resolved = parse_rank_command_line(sys.argv[1:], __doc__, "run.yml serve_port=8000")
    prepare_rank()
    from megatron.inference.server.serve import serve
    from megatron.plan.preflight import config_for
    from megatron.run.requested import fetch_requested
    from megatron.training.setup import Process, run, start_process

    process = start_process(paths, overrides, resolved, partial(config_for, user_script="serve.py"))

    def work(process: Process) -> int:
        fetch_requested(process)
        return serve(process)

    return run(process, work)


if __name__ == "__main__":
    run_cli(main, is_run=True)
