"""What can be refused at once: missing tokenizer, data files and checkpoints.

Ranks need seconds to import torch before they find out; this takes a few tenths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.feed_forward_width import stored_width
from megatron.checkpoint.find import Checkpoint, list_checkpoints
from megatron.checkpoint.hugging_face import names_published_model
from megatron.checkpoint.lock import refuse_if_held
from megatron.checkpoint.start import Start, check_folder, decide_start
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.cluster.launch import Placement, place
from megatron.data.order.sources import TEXTS, named_files, named_paths
from megatron.data.order.splits import NAMES
from megatron.data.tokens.prefixes import MAKE_CHATS, MAKE_TEXTS
from megatron.data.tokens.token_files import find_files, is_glob
from megatron.errors import DeepyError, UserError
from megatron.hub.s3_load import coming_start, find_first
from megatron.inference.inputs import check_requests, check_reward_model, requested_checkpoint, rollout_prompts
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_device, check_trainable, derive
from megatron.neox_arguments.inference import for_inference
from megatron.neox_arguments.mixtures import COMPANIONS
from megatron.neox_arguments.open_width import fit_width, is_open
from megatron.neox_arguments.overrides import COMMAND_LINE, PYTHON_CALL, Overrides
from megatron.neox_arguments.problems import Problems, collector
from megatron.neox_arguments.rules_pairs import written
from megatron.neox_arguments.rules_post import has_teacher
from megatron.plan.chats import with_chats
from megatron.plan.from_checkpoint import files_or_checkpoint
from megatron.plan.refusals import check_data, check_fit, check_folders, open_other
from megatron.tokenizer import Tokenizer, build_tokenizer

KINDS = ("train", "eval", "generate", "serve")


# What a config file must hold rightly before these can be looked for.
_FOR_PLACE = ("hostfile", "launcher", "include", "exclude", "num_nodes", "num_gpus", "global_num_gpus")
_FOR_PLACE += ("pipe_parallel_size", "model_parallel_size", "expert_parallel_size")
FOR_TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "vocab_size")
_FOR_START = ("load", "save", "iteration", "finetune", "init_from", "restart_if_damaged")
_FOR_START += ("s3_path", "s3_load", "s3_chunk_size")
_FOR_DATA = ("data_path", "mixture", "valid_sets", "precompute_model_name")
_FOR_DATA += ("ga_dataset", "ga_label_dataset", "gd_retain_dataset", "gd_retain_label_dataset")
_FOR_DATA += tuple(key.format(role) for key in ("{}_data_paths", *COMPANIONS.values()) for role in NAMES)
_NO_REFERENCE = "Without precompute_model_name the run computes the log-probabilities itself."


@dataclass(frozen=True)
class Found:
    """What a run will start from; None for what is missing. `has_data`: all that the config names is there and fits.
    `prompts`: how many there are to be completed."""

    tokenizer: Tokenizer | None
    start: Start | Checkpoint | None
    has_data: bool
    prompts: int = 0


def kind_of(user_script: str) -> str | None:
    """What a script does, by its name: train, eval, generate or serve; None for a script of the user's own."""
    stem = Path(user_script).stem
    return stem if stem in KINDS else None


def config_for(args: NeoXArgs, user_script: str) -> NeoXArgs:
    """The configuration that the script's ranks will use: without what only training needs for eval and generate, and
    with the meaning of `intermediate_size` that the checkpoint shows from which they start."""
    kind = kind_of(user_script) or "train"
    if kind != "train":
        args = for_inference(prefer_own_run(args))
    if kind_of(user_script) is not None:
        args = _with_published_model(args, kind)
    if kind_of(user_script) == "train":
        args = with_chats(args)
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


def read_config(
    paths: Sequence[str], overrides: Overrides, user_script: str, problems: Problems | None = None
) -> NeoXArgs:
    """`config_for` config files and overrides; what trains no model takes a checkpoint's folder in their place."""
    if kind_of(user_script) in (None, "train"):
        return config_for(NeoXArgs.from_files(paths, overrides, problems=problems), user_script)
    return config_for(files_or_checkpoint(paths, overrides, problems), user_script)


def prefer_own_run(args: NeoXArgs) -> NeoXArgs:
    """For evaluation and generation: a Hugging Face model in `load` is where the run of a config began, and what it has
    saved since comes first, unless the command line says `load`."""
    load, save, by_call = args.checkpoint.load, args.checkpoint.save, (COMMAND_LINE, PYTHON_CALL)
    if load is None or save is None or args.source("load").startswith(by_call):
        return args
    if not names_published_model(load) and Path(load).exists():
        return args
    saved = list_checkpoints(save)
    began = saved.latest is not None and saved.checkpoints[saved.latest].manifest.config.get("hf_model")
    return args.replace(args.source("save"), load=save) if began else args


def _with_published_model(args: NeoXArgs, kind: str) -> NeoXArgs:
    """The config with what the Hugging Face model says that the run starts from, or its checkpoint's run began with.

    Raises `UserError` when the config describes no model, and the one that it names is not there.
    """
    options = args.checkpoint
    named = options.load or (options.init_from or {}).get("path") or options.save
    described = args.is_set("num_layers") and args.is_set("hidden_size")
    if named is None or described and not (names_published_model(named) or not Path(named).exists()):
        return args
    try:
        checkpoint, grows = _first_weights(args, kind)
    except DeepyError:
        if described or named == options.save:
            return args  # it is reported where it is needed
        raise
    if checkpoint is None or not (checkpoint.published or checkpoint.manifest.config.get("hf_model")):
        return args
    from megatron.convert.hf.run_config import with_model  # needs torch, and only here

    try:
        return _pinned(with_model(args, checkpoint, grows=grows), checkpoint)
    except UserError as error:
        key = "init_from.path" if kind == "train" and options.init_from else "load" if checkpoint.published else "save"
        raise UserError(f"{key}: {error}") from error


def _first_weights(args: NeoXArgs, kind: str) -> tuple[Checkpoint | None, bool]:
    """(the checkpoint that a run starts from, whether its model may have other shapes); None: new weights."""
    if (coming := find_first(args.checkpoint)) is not None:
        return Checkpoint(coming.root, coming.stored.manifest(coming.step)), False
    start = _start(args, kind, to_write=False)
    if isinstance(start, Start):
        return start.checkpoint, start.init is not None and start.init.grows
    return start, False


def _pinned(args: NeoXArgs, checkpoint: Checkpoint) -> NeoXArgs:
    """The config with the commit of a model of the Hub where it names the model: all ranks take the same one."""
    name, load, init = checkpoint.published, args.checkpoint.load, args.checkpoint.init_from
    if name is None or "@" not in name:
        return args
    if load is not None and names_published_model(load):
        return args.replace(args.source("load"), load=name)
    return args if init is None else args.replace(args.source("init_from"), init_from={**init, "path": name})


def load(
    paths: Sequence[str], overrides: Overrides, user_script: str, env: Mapping[str, str], problems: Problems
) -> tuple[NeoXArgs, Placement | None]:
    """The configuration that the script's ranks will use, to be derived, and where they go.

    What is wrong with either is added to `problems`; the place is None then, where it follows from that.
    """
    args = read_config(paths, overrides, user_script, problems)
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
    prompts = 0
    with collector(problems) as found:
        has_data = kind == "train" and check_data_paths(args, found)
        if found.usable(*FOR_TOKENIZER):
            with located(args, found):
                tokenizer = build_tokenizer(args.tokenizer)
        if found.usable(*_FOR_START):
            with located(args, found):
                if kind == "train" and args.checkpoint.save is not None:
                    refuse_if_held(args.checkpoint.save, wait)
                start = _start_or_coming(args, kind)
        with located(args, found):
            if kind == "train":
                check_folders(args)
                prompts = len(rollout_prompts(args.post))
                rollout_prompts(args.post, "rollout_valid_prompts")
            check_requests(args.generation, kind)
        if found.keys:
            return Found(tokenizer, start, has_data, prompts)  # the rest compares whole configurations
        before = len(found.found)
        with located(args, found):
            checkpoint = start.checkpoint if isinstance(start, Start) else start
            if checkpoint is not None and checkpoint.manifest.base is not None:
                from megatron.checkpoint.base import open_base  # needs torch, and only here

                open_base(checkpoint, args.post.lora_base)
            if isinstance(start, Start):
                check_fit(args, start)
                if tokenizer is not None and has_data:
                    check_data(args, data_paths(args), tokenizer, start)
                if not start.resumes:  # else the run finds those that it has had (OtherModels)
                    _check_others(args, tokenizer)
            elif start is not None and tokenizer is not None:
                check_tokenizer(start, tokenizer, args.checkpoint.allow_config_changes)
        has_data = has_data and len(found.found) == before
    return Found(tokenizer, start, has_data, prompts)


def _check_others(args: NeoXArgs, tokenizer: Tokenizer | None) -> None:
    """The models that training needs beside its own are there, and of this tokenizer. Raises `UserError`."""
    for key in ("reward_model", *(["distill_teacher"] if has_teacher(args.get) else [])):
        if args.get(key) is not None:
            checkpoint = open_other(args, key)
            if key == "reward_model":
                check_reward_model(checkpoint)
            if tokenizer is not None:
                check_tokenizer(checkpoint, tokenizer, args.checkpoint.allow_config_changes)


@contextmanager
def located(args: NeoXArgs, problems: Problems, key: str | None = None) -> Iterator[None]:
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
    files, before = named_files(args.data, _active_roles(args)), len(problems.found)
    pairs, name = args.data.dataset_impl == "pairwise", args.data.precompute_model_name
    for key, what, path in files:
        with located(args, problems, _written(args, key)):
            found = find_files(path, MAKE_CHATS if pairs or what != "path" else MAKE_TEXTS)
            # Of a run that unlearns, what is forgotten is compared with another model.
            if name is None or what not in TEXTS or key != "ga_dataset" and args.data.ga_dataset is not None:
                continue
            with located(args, problems, "precompute_model_name"):
                find_files(f"{path if is_glob(path) else found[0]}_{name}", _NO_REFERENCE)
    return bool(files) and len(problems.found) == before


def _written(args: NeoXArgs, key: str) -> str:
    """The key that the user set: `key`, or one that means it."""
    return next((one for one in (written(args.get, key), "mixture") if args.is_set(one)), key)


def data_paths(args: NeoXArgs) -> list[str]:
    """The paths of all texts that a derived config names."""
    return named_paths(args.data, _active_roles(args))


def _active_roles(args: NeoXArgs) -> list[str]:
    """The roles of a derived config; training is one where its length is missing."""
    training = args.training
    active = {"train": training.do_train, "valid": training.do_valid, "test": training.do_test}
    active["train"] = active["train"] or training.train_iters is None
    return [role for role in NAMES if active[role]]


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
