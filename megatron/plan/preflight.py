"""What can be refused at once: missing tokenizer, data files and checkpoints.

Ranks need seconds to import torch before they find out; this takes a few tenths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.feed_forward_width import stored_width
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.lock import refuse_if_held
from megatron.checkpoint.start import Start, check_folder, decide_start
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.cluster.launch import Placement, place
from megatron.data.order.sources import named_paths
from megatron.data.order.splits import NAMES
from megatron.data.tokens.token_files import find_files
from megatron.errors import DeepyError, UserError
from megatron.hub.s3_load import coming_start, find_first
from megatron.inference.inputs import check_requests, read_objects, requested_checkpoint
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_device, check_trainable, derive
from megatron.neox_arguments.inference import for_inference
from megatron.neox_arguments.open_width import fit_width, is_open
from megatron.neox_arguments.overrides import Overrides
from megatron.neox_arguments.problems import Problems, collector
from megatron.plan.refusals import check_data, check_fit, check_folders
from megatron.tokenizer import Tokenizer, build_tokenizer

KINDS = ("train", "eval", "generate")


# What a config file must hold rightly before these can be looked for.
_FOR_PLACE = ("hostfile", "launcher", "include", "exclude", "num_nodes", "num_gpus", "global_num_gpus")
_FOR_PLACE += ("pipe_parallel_size", "model_parallel_size", "expert_parallel_size")
FOR_TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "vocab_size")
_FOR_START = ("load", "save", "iteration", "finetune", "init_from", "restart_if_damaged")
_FOR_START += ("s3_path", "s3_load", "s3_chunk_size")
_PATHS = ("data_path", "ga_dataset", "gd_retain_dataset")
_PATHS += tuple(f"{side}{role}_data_paths" for side in ("", "neg_") for role in NAMES)
_FOR_DATA = (*_PATHS, "mixture", "valid_sets")


@dataclass(frozen=True)
class Found:
    """What a run will start from; None for what is missing. `has_data`: all that the config names is there and fits."""

    tokenizer: Tokenizer | None
    start: Start | Checkpoint | None
    has_data: bool


def kind_of(user_script: str) -> str | None:
    """What a script does, by its name: train, eval or generate; None for a script of the user's own."""
    stem = Path(user_script).stem
    return stem if stem in KINDS else None


def config_for(args: NeoXArgs, user_script: str) -> NeoXArgs:
    """The configuration that the script's ranks will use: without what only training needs for eval and generate, and
    with the meaning of `intermediate_size` that the checkpoint shows from which they start."""
    kind = kind_of(user_script) or "train"
    if kind != "train":
        args = for_inference(args)
    if not is_open(args):
        return args
    with suppress(DeepyError):  # a missing checkpoint is reported where it is needed
        if (coming := find_first(args.checkpoint)) is not None:
            manifest = coming.stored.manifest(coming.step)
            return fit_width(args, stored_width(Checkpoint(coming.root, manifest)), coming.address)
        start = _start(args, kind, to_write=False)
        checkpoint = start.checkpoint if isinstance(start, Start) else start
        if checkpoint is not None:
            return fit_width(args, stored_width(checkpoint), str(checkpoint.path))
    return args


def load(
    paths: Sequence[str], overrides: Overrides, user_script: str, env: Mapping[str, str], problems: Problems
) -> tuple[NeoXArgs, Placement | None]:
    """The configuration that the script's ranks will use, to be derived, and where they go.

    What is wrong with either is added to `problems`; the place is None then, where it follows from that.
    """
    args = config_for(NeoXArgs.from_files(paths, overrides, problems=problems), user_script)
    if not problems.usable(*_FOR_PLACE):
        problems.keys.add("global_num_gpus")  # how many ranks there are follows from the place
        return args, None
    with problems.collect("global_num_gpus"):
        return args, place(args, env)
    return args, None


def explain(args: NeoXArgs, key: str, env: Mapping[str, str]) -> str:
    """What `--explain KEY` prints: with derived values; for a config that is not complete, without them."""
    try:
        return derive(args, Facts(num_devices=place(args, env).world_size)).explain(key)
    except UserError as error:
        return f"{args.explain(key)}\n  (the config is not complete: {error})"


def check_before_launch(
    args: NeoXArgs, placement: Placement | None, user_script: str, problems: Problems | None = None
) -> None:
    """Show what is wrong before any rank starts. Other hosts may see other files: for those only the config counts.

    Raises one `UserError`, or adds to `problems`; `placement` is None when they hold what is wrong with it.
    """
    kind = kind_of(user_script)
    with collector(problems) as found:
        derived = derive(args, Facts(num_devices=placement.world_size if placement else None), found)
        if kind == "train":
            check_trainable(derived, found)
        if kind == "train" and placement is not None and placement.gpus is not None:
            check_device(derived, placement.gpus > 0, found)
        if kind is not None and (placement is None or placement.launcher is None):
            preflight(derived, kind, wait=not found.found, problems=found)


def preflight(args: NeoXArgs, kind: str, wait: bool = False, problems: Problems | None = None) -> Found:
    """Check the files that a derived config names, for a run of this kind. Raises the real run's `UserError`, one for
    all that is wrong; with `problems` it is added to them, and what is missing is None.

    `wait`: first for a job that writes to `save` and ends, as the run does.
    """
    tokenizer: Tokenizer | None = None
    start: Start | Checkpoint | None = None
    with collector(problems) as found:
        has_data = kind == "train" and check_data_paths(args, found)
        if found.usable(*FOR_TOKENIZER):
            with _collect(args, found):
                tokenizer = build_tokenizer(args.tokenizer)
        if found.usable(*_FOR_START):
            with _collect(args, found):
                if kind == "train" and args.checkpoint.save is not None:
                    refuse_if_held(args.checkpoint.save, wait)
                start = _start_or_coming(args, kind)
        with _collect(args, found):
            if kind == "train":
                check_folders(args)
                for file in args.post.rollout_prompts or ():
                    read_objects(file, "rollout_prompts")
            check_requests(args.generation, kind)
        if found.keys:
            return Found(tokenizer, start, has_data)  # the rest compares whole configurations
        before = len(found.found)
        with _collect(args, found):
            checkpoint = start.checkpoint if isinstance(start, Start) else start
            if checkpoint is not None and checkpoint.manifest.base is not None:
                from megatron.checkpoint.base import open_base  # needs torch, and only here

                open_base(checkpoint, args.post.lora_base)
            if isinstance(start, Start):
                check_fit(args, start)
                if tokenizer is not None and has_data:
                    check_data(args, data_paths(args), tokenizer, start)
            elif start is not None and tokenizer is not None:
                check_tokenizer(start, tokenizer, args.checkpoint.allow_config_changes)
        has_data = has_data and len(found.found) == before
    return Found(tokenizer, start, has_data)


@contextmanager
def _collect(args: NeoXArgs, problems: Problems, key: str | None = None) -> Iterator[None]:
    """Add what is raised inside, with file and line of `key`, or of the key that the message begins with."""
    try:
        yield
    except UserError as problem:
        text = str(problem) if key is None else f"{key}: {str(problem).removeprefix('data path: ')}"
        source = args.source(text.partition(":")[0])
        located = f"{source}: {text}" if ":" in source and not source.startswith("derived") else text
        problems.add(problem if located == str(problem) else located)


def check_data_paths(args: NeoXArgs, problems: Problems) -> bool:
    """Whether all data that the config names is there; each path that is not is added to `problems`."""
    if not problems.usable(*_FOR_DATA):
        return False
    given = {key: args.get(key) for key in _PATHS if args.is_set(key)}
    ends = {key: (value,) if isinstance(value, str) else tuple(value or ()) for key, value in given.items()}
    paths, before = data_paths(args), len(problems.found)
    for path in paths:
        key = next((key for key, written in ends.items() if path.endswith(written)), None)
        with _collect(args, problems, key):
            find_files(path)
    return bool(paths) and len(problems.found) == before


def data_paths(args: NeoXArgs) -> list[str]:
    """The data paths of the roles that are active in a derived config; training is one where its length is missing."""
    training = args.training
    active = {"train": training.do_train, "valid": training.do_valid, "test": training.do_test}
    active["train"] = active["train"] or training.train_iters is None
    return named_paths(args.data, [role for role in NAMES if active[role]])


def _start(args: NeoXArgs, kind: str, to_write: bool = True) -> Start | Checkpoint:
    """Where training starts, or the checkpoint that eval and generate read."""
    return decide_start(args.checkpoint, to_write=to_write) if kind == "train" else requested_checkpoint(args)


def _start_or_coming(args: NeoXArgs, kind: str) -> Start | Checkpoint | None:
    """The same; without its checkpoint when the run fetches it first."""
    if (coming := coming_start(args.checkpoint)) is None:
        return _start(args, kind)
    if kind != "train":
        return None
    if args.checkpoint.save is not None:
        check_folder("save", Path(args.checkpoint.save))
    return coming
