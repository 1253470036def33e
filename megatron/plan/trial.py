"""Does a config work? Its dry run at its own size, and two training steps of a tiny model of the same kind."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.cluster.launch import place
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.rules_schedule import LENGTHS
from megatron.plan.planner import plan
from megatron.plan.shrink import as_overrides, shrink_overrides, synthetic_overrides

_SCRIPT = "train.py"


def dry_run(paths: list[str], data: str, save: str, env: Mapping[str, str]) -> NeoXArgs:
    """Load, check and plan config files as `deepy.py train.py --dry-run` does in the environment `env`, on the data set
    `data` (a prefix); returns the derived configuration as it is written. Raises the dry run's `UserError`."""
    written = NeoXArgs.from_files(paths)
    args = derive(written, Facts(num_devices=place(written, env).world_size))
    if all(getattr(args.training, name) is None for name in LENGTHS):
        raise UserError(f"set train_iters (or {', '.join(LENGTHS[1:])}): how long to train")
    ours = NeoXArgs.from_files(paths, as_overrides(synthetic_overrides(written, data, save)))
    plan(ours, place(ours, env), _SCRIPT)
    return args


def train_two_steps(paths: list[str], args: NeoXArgs, data: str) -> None:
    """Train a shrunk model (`args`: the config as it is written) in this process, which stands for the only rank."""
    from megatron.run.train import train
    from megatron.training.setup import run, start_process

    overrides = as_overrides({**synthetic_overrides(args, data, None), **shrink_overrides(args)})
    if code := run(start_process(paths, overrides, None), train):
        raise UserError(f"training stopped with exit code {code}")
