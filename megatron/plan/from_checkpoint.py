"""A checkpoint in place of config files, for what reads a model and trains none: `deepy chat checkpoints/tiny`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.find import Checkpoint, list_checkpoints, open_checkpoint
from megatron.checkpoint.hugging_face import names_published_model
from megatron.checkpoint.layout import MANIFEST, find_vocab_file, step_of
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.groups import GROUPS
from megatron.neox_arguments.inference import for_inference
from megatron.neox_arguments.keys import group_keys
from megatron.neox_arguments.overrides import COMMAND_LINE, Overrides
from megatron.neox_arguments.problems import Problems

# What was the training job's: where and at which layout it ran, what it logged and generated.
_OF_THE_JOB = ("launcher", "parallel", "logging", "generation")


def files_or_checkpoint(paths: Sequence[str], overrides: Overrides, problems: Problems | None = None) -> NeoXArgs:
    """Config files and overrides, merged; or, where one of the paths is a folder with a checkpoint or names a Hugging
    Face model, its network and tokenizer with the keys of the others over it, on one rank unless they say so.

    Raises `UserError` when the folder holds none.
    """
    folders = [path for path in paths if not Path(path).is_file()]
    given = NeoXArgs.from_files([path for path in paths if path not in folders], overrides, problems=problems)
    if not folders:
        return given
    if len(folders) > 1:
        raise UserError(f"{', '.join(folders)}: give one checkpoint")
    (folder,) = folders
    if names_published_model(folder):
        return given.replace(COMMAND_LINE, load=folder)
    checkpoint = _find(Path(folder), given.checkpoint.iteration)
    return _over(_saved(checkpoint), given)


def _find(folder: Path, iteration: int | None) -> Checkpoint:
    if step_of(folder.name) is not None:
        return open_checkpoint(folder)
    return list_checkpoints(folder).choose(iteration, "checkpoint")


def _saved(checkpoint: Checkpoint) -> NeoXArgs:
    """The model of the checkpoint, to be loaded from there, with the defaults of everything else.

    Raises `UserError` for a plugin that only the checkpoint names, and for GPT-NeoX's, which name no network.
    """
    where, config = str(checkpoint.path / MANIFEST), checkpoint.manifest.config
    if not config:
        raise UserError(f"{checkpoint.path} does not say what network it holds: give its config file, too, and load=")
    args = for_inference(NeoXArgs.from_saved(config, source=where))
    plain = NeoXArgs.from_values({}).values()
    ours = {name: plain[name] for group in _OF_THE_JOB for name in group_keys(GROUPS[group], group)}
    ours["plugins"] = args.launcher.plugins
    sources = {name: source for name, source in args.sources.items() if name.split(".")[0] not in ours}
    ours |= {
        "load": str(checkpoint.path.parent),
        "iteration": step_of(checkpoint.path.name),
        "vocab_file": find_vocab_file(args.tokenizer.vocab_file, checkpoint.path),
    }
    return NeoXArgs.from_values(args.values() | ours, {**sources, "load": where, "iteration": where}, args.notes)


def _over(saved: NeoXArgs, given: NeoXArgs) -> NeoXArgs:
    """The one with what is set in the other."""
    names = {name.split(".")[0] for name in given.sources}
    values = given.values()
    changes = {name: values[name] for name in names}
    return NeoXArgs.from_values(saved.values() | changes, {**saved.sources, **given.sources}, given.notes)
