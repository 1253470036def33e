#!/usr/bin/env python
"""What every rank runs to generate text from a checkpoint. Usually started by deepy.py; torchrun works as well."""

from __future__ import annotations

import sys
from functools import partial

from megatron.cluster.command_line import parse_rank_command_line
from megatron.cluster.devices import choose_accelerator
from megatron.errors import run_cli
from megatron.signals import ExitAtStop


def main() -> int:
    """Join the job, load the model, write texts."""
    ExitAtStop()
    paths, overrides, resolved = parse_rank_command_line(
        sys.argv[1:], __doc__, "run.yml configs/text_generation.yml sample_input_file=prompts.txt"
    )
    choose_accelerator()
    from megatron.inference.modes import write_texts
    from megatron.plan.preflight import config_for
    from megatron.training.setup import run, start_process

    process = start_process(paths, overrides, resolved, partial(config_for, user_script="generate.py"))
    return run(process, write_texts)


if __name__ == "__main__":
    run_cli(main, is_run=True)
