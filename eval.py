#!/usr/bin/env python
"""What every rank runs to evaluate a checkpoint with lm-eval. Usually started by deepy.py; torchrun works as well."""

from __future__ import annotations

import sys
from functools import partial

from megatron.cluster.command_line import parse_rank_command_line
from megatron.cluster.rank import prepare_rank
from megatron.errors import run_cli
from megatron.signals import ExitAtStop


def main() -> int:
    """Join the job, load the model, run the tasks; results also go where the run's metrics go."""
    ExitAtStop()
    paths, overrides, resolved = parse_rank_command_line(sys.argv[1:], __doc__, "run.yml --eval_tasks lambada_openai")
    prepare_rank()
    from megatron.callbacks import RunContext, build_callbacks
    from megatron.callbacks.tracker import Tracker
    from megatron.inference.evaluate import evaluate
    from megatron.plan.preflight import config_for
    from megatron.run.requested import fetch_requested
    from megatron.training.setup import Process, run, start_process

    process = start_process(paths, overrides, resolved, partial(config_for, user_script="eval.py"))
    context = RunContext(process.args, process.state, process.tokenizer.vocab_size)
    trackers = build_callbacks(context, Tracker) if process.state.rank == 0 else []

    def report(metrics: dict[str, float], step: int) -> None:
        for tracker in trackers:
            tracker.write(metrics, step)
            tracker.close()

    def work(process: Process) -> int:
        fetch_requested(process)
        return evaluate(process, report)

    return run(process, work)


if __name__ == "__main__":
    run_cli(main, is_run=True)
