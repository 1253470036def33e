#!/usr/bin/env python
"""What every rank runs to train. Usually started by deepy.py; torchrun, srun and mpirun work as well."""

from __future__ import annotations

import sys
from functools import partial

from megatron.cluster.command_line import parse_rank_command_line
from megatron.cluster.rank import prepare_rank
from megatron.errors import run_cli
from megatron.signals import ExitAtStop


def main() -> int:
    """Join the job and train."""
    starting = ExitAtStop()
    paths, overrides, resolved = parse_rank_command_line(sys.argv[1:], __doc__, "run.yml train_iters=100")
    prepare_rank()
    from megatron.neox_arguments.derive import check_trainable
    from megatron.plan.preflight import config_for
    from megatron.run.train import train
    from megatron.training.setup import run, start_process

    prepare = partial(config_for, user_script="train.py")
    process = start_process(paths, overrides, resolved, prepare, check=check_trainable)
    starting.allow(5.0)
    return run(process, train)


if __name__ == "__main__":
    run_cli(main, is_run=True)
