"""What can be refused at once: missing tokenizer, data files and checkpoints.

Ranks need seconds to import torch before they find out; this takes a few tenths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.lock import refuse_if_held
from megatron.checkpoint.start import Start, decide_start
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.cluster.launch import Placement
from megatron.data.order.sources import named_paths
from megatron.data.order.splits import NAMES
from megatron.data.tokens.token_files import find_files
from megatron.inference.inputs import check_requests, requested_checkpoint
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_device, check_trainable, derive
from megatron.neox_arguments.inference import for_inference
from megatron.plan.refusals import check_data, check_fit, check_folders
from megatron.tokenizer import Tokenizer, build_tokenizer

KINDS = ("train", "eval", "generate")


@dataclass(frozen=True)
class Found:
    """What a run will start from."""

    tokenizer: Tokenizer
    start: Start | Checkpoint


def kind_of(user_script: str) -> str | None:
    """What a script does, by its name: train, eval or generate; None for a script of the user's own."""
    stem = Path(user_script).stem
    return stem if stem in KINDS else None


def config_for(args: NeoXArgs, user_script: str) -> NeoXArgs:
    """The configuration that the script's ranks will use: without what only training needs for eval and generate."""
    return for_inference(args) if kind_of(user_script) in ("eval", "generate") else args


def check_before_launch(args: NeoXArgs, placement: Placement, user_script: str) -> None:
    """Show what is wrong before any rank starts. Other hosts may see other files: for those only the config counts."""
    derived = derive(args, Facts(num_devices=placement.world_size))
    kind = kind_of(user_script)
    if kind is not None and placement.launcher is None:
        preflight(derived, kind, wait=True)
    if kind == "train" and placement.gpus is not None:
        check_device(derived, placement.gpus > 0)


def preflight(args: NeoXArgs, kind: str, wait: bool = False) -> Found:
    """Check the files that a derived config names, for a run of this kind. Raises the real run's `UserError`.

    `wait`: first for a job that writes to `save` and ends, as the run does.
    """
    if kind == "train":
        check_trainable(args)
        for path in data_paths(args):
            find_files(path)
        if args.checkpoint.save is not None:
            refuse_if_held(args.checkpoint.save, wait)
    found = Found(build_tokenizer(args.tokenizer), _start(args, kind))
    if isinstance(found.start, Start):
        check_folders(args)
        check_fit(args, found.start)
        check_data(args, data_paths(args), found.tokenizer, found.start)
    else:
        check_requests(args.generation, kind)
        check_tokenizer(found.start, found.tokenizer, args.checkpoint.allow_config_changes)
    return found


def data_paths(args: NeoXArgs) -> list[str]:
    """The data paths of the roles that are active in a derived config."""
    active = {"train": args.training.do_train, "valid": args.training.do_valid, "test": args.training.do_test}
    return named_paths(args.data, [role for role in NAMES if active[role]])


def _start(args: NeoXArgs, kind: str) -> Start | Checkpoint:
    """Where training starts, or the checkpoint that eval and generate read."""
    if kind == "train":
        return decide_start(args.checkpoint)
    return requested_checkpoint(args)
