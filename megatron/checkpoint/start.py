"""Where a training run starts: what `load`, `save`, `iteration`, `finetune` and `init_from` mean. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.find import NONE_DAMAGED, Checkpoint, Damaged, find_checkpoint, list_checkpoints
from megatron.checkpoint.hugging_face import names_published_model
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.neox_run import with_counters
from megatron.errors import UserError
from megatron.neox_arguments.schema_train import CheckpointConfig


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        kind: `fresh` (new weights), `resume` (from `save`), `load` (first start, from `load`), `finetune`
            (first start: weights of `load` only, step 0) or `init` (first start, from `init_from`).
        checkpoint: the checkpoint that it starts from, opened; None when fresh.
        step: the step the run starts at.
        message: the decision in words, to be logged; with the newer checkpoints that are `skipped`.
        init: the keys of `init_from`; None unless `kind` is `init`.
    """

    kind: str
    checkpoint: Checkpoint | None
    step: int
    message: str
    init: InitFrom | None = None

    @property
    def resumes(self) -> bool:
        """Whether the checkpoint's own run continues, with its schedule and the state of its loop."""
        return self.kind in ("resume", "load")

    @property
    def skips(self) -> bool:
        """Whether newer checkpoints are damaged or incomplete, so that the run begins from an older one."""
        return self.checkpoint is not None and bool(self.checkpoint.skipped)

    @property
    def load_optim(self) -> bool:
        """Whether the optimizer's state is loaded."""
        return self.resumes or (self.init is not None and self.init.optimizer == "keep")

    @property
    def load_data(self) -> bool:
        """Whether the order of the samples, and the number of those consumed, are the checkpoint's."""
        return self.resumes or (self.init is not None and self.init.data == "continue")

    @property
    def load_rng(self) -> bool:
        """Whether random states are loaded: they belong to the steps."""
        return self.resumes or (self.init is not None and self.init.step == "continue")


def decide_start(options: CheckpointConfig, *, to_write: bool = True, damaged: Damaged = NONE_DAMAGED) -> Start:
    """Where a training run starts; reads the folders that the config names, changes nothing.

    * `save` holds a complete checkpoint: the run continues from it. `load`, `iteration`, `finetune` and `init_from`
      are for the first start only. (When `iteration` is of the same folder, because `load` names it or is not set, and
      the run that wrote the newest checkpoint was not itself started with it, then this *is* the first start with it.)
    * else, with checkpoints in `save` that are damaged, `restart_if_damaged` must be set.
    * else `init_from` must hold what is asked for.
    * else `load` unset or equal to `save`: a fresh start.
    * else `load` must hold what is asked for.

    A checkpoint whose state cannot be read counts as incomplete, and so do those in `damaged`: an older one is taken,
    and the message says so.

    Raises `UserError` listing what the folder holds when the checkpoint asked for is missing or incomplete, and with
    `to_write` when `save` cannot be a folder to write in.
    """
    while True:
        start = _decide(options, to_write, damaged)
        if (found := start.checkpoint) is None:
            return start
        if found.state_problem is None:
            return replace(start, message=start.message + found.skipped_note)
        damaged = {**damaged, found.path: found.state_problem}


def _decide(options: CheckpointConfig, to_write: bool, damaged: Damaged) -> Start:
    save, load, iteration = options.save, options.load, options.iteration
    init = InitFrom.of(options.init_from)
    same = loads_own(options)
    if save is not None:
        if to_write:
            check_folder("save", Path(save))
        if Path(save).is_dir() and names_published_model(save):
            raise UserError(f"save: {save} is a Hugging Face model; name a folder of this run's own")
        saved = list_checkpoints(save, damaged=damaged)
        newest = None if saved.latest is None else saved.choose(None, "save")
        began_with = None if newest is None else newest.manifest.config.get("iteration")
        if same and iteration is not None and saved.steps and began_with != iteration:
            return _start_from(saved.choose(iteration, "load"), options)
        if newest is not None:
            return _resume(newest, options, init)
        if saved.holds_neox and (problem := _unlike_their_run(options, same)):
            # A new run among them would look like GPT-NeoX's run, continued.
            raise UserError(f"save: {save} holds checkpoints of GPT-NeoX, and {problem}; name another folder in `save`")
        if saved.holds_neox:
            return _start_from(find_checkpoint(save, damaged=damaged), options)
        if (saved.incomplete or saved.steps) and not options.restart_if_damaged:
            other = f", take iteration={saved.steps[-1]} with `load` not set" if saved.steps else ""
            raise UserError(
                f"save: {save} holds {saved.describe()}. A new run would begin at step 0 and replace what is left of "
                f"this one. Copy the folder again from where it is whole{other}, set another `save`, or set "
                "restart_if_damaged=true to begin there from zero"
            )
    if init is not None:
        return _start_from_other_run(save, init, damaged)
    if load is None or same:
        if iteration:
            where = f"`save` holds none: {list_checkpoints(save).describe()}" if save else "`load` is not set"
            raise UserError(f"iteration: {iteration} asks for a checkpoint, but {where}")
        return Start("fresh", None, 0, _fresh_message(options))
    return _start_from(find_checkpoint(load, iteration, damaged=damaged), options)


def loads_own(options: CheckpointConfig) -> bool:
    """Whether `load` and `iteration` speak of the run's own checkpoints, those in `save`."""
    if options.save is None:
        return False
    return options.iteration is not None if options.load is None else _same_folder(options.save, options.load)


def _unlike_their_run(options: CheckpointConfig, same: bool) -> str | None:
    """Why this start does not continue the run whose checkpoints are in `save`; None when it does."""
    if options.finetune or options.init_from or not same or options.load is None:
        return "this start does not continue their run (which `load` of the same folder does)"
    if options.iteration is not None:
        return f"iteration: {options.iteration} would write over those that came later"
    return None


def _start_from(checkpoint: Checkpoint, options: CheckpointConfig) -> Start:
    """The first start, from a checkpoint of `load`."""
    path, step = checkpoint.path, checkpoint.manifest.step
    if checkpoint.published is not None:
        message = f"starting at step 0 with the weights of the Hugging Face model {checkpoint.published}"
        return Start("finetune", checkpoint, 0, message)
    if options.finetune:
        by = ", written by GPT-NeoX" if checkpoint.by_neox else ""
        return Start("finetune", checkpoint, 0, f"starting at step 0 with the weights of {path}{by} (finetune)")
    if checkpoint.by_neox:
        checkpoint = with_counters(checkpoint)
        step, consumed = checkpoint.manifest.step, checkpoint.manifest.consumed
        message = f"continuing GPT-NeoX's run from {path} at step {step}, after {consumed:,} samples"
        return Start("load", checkpoint, step, message)
    asked = "latest" if options.iteration is None else "iteration"
    return Start("load", checkpoint, step, f"loading {path} (by {asked}): the run continues at step {step}")


def _start_from_other_run(save: str | None, init: InitFrom, damaged: Damaged) -> Start:
    checkpoint = find_checkpoint(init.path, init.iteration, "init_from", damaged)
    path = checkpoint.path
    if save is not None and os.path.realpath(save) in (os.path.realpath(path), os.path.realpath(path.parent)):
        raise UserError(f"init_from: {init.path} is in `save`; choose another `save` for the new run")
    if checkpoint.published is not None and (init.data, init.optimizer, init.step) != ("restart", "reset", "restart"):
        raise UserError(
            f"init_from: {path} is a Hugging Face model, which has weights alone; set init_from.data=restart, "
            "init_from.optimizer=reset and init_from.step=restart"
        )
    if checkpoint.by_neox and init.data != "restart":
        raise UserError(
            f"init_from: {path} was written by GPT-NeoX, which does not record its order of samples; set "
            "init_from.data=restart and, for new moments, init_from.optimizer=reset (`load` instead of init_from "
            "continues its run, with its data)"
        )
    if checkpoint.by_neox and init.grows:
        raise UserError(
            f"init_from: {path} was written by GPT-NeoX; vocab: resize and layer_map take a checkpoint of Deepy: let a"
            " run of the old model save one first (load with finetune: true)"
        )
    if checkpoint.by_neox and init.optimizer == "keep":
        checkpoint = with_counters(checkpoint)
    message = f"starting from {path} (init_from): {init.describe(checkpoint.manifest)}"
    return Start("init", checkpoint, init.first_step(checkpoint.manifest), message, init)


def _resume(newest: Checkpoint, options: CheckpointConfig, init: InitFrom | None) -> Start:
    step = newest.manifest.step
    message = f"resuming from {newest.path} at step {step}"
    load, iteration = options.load, options.iteration
    ignored = [f"load: {load}"] if load is not None and not _same_folder(load, newest.path.parent) else []
    ignored += [f"iteration: {iteration}"] if iteration not in (None, step) else []
    ignored += ["finetune"] if options.finetune else []
    ignored += [f"init_from: {init.path}"] if init is not None else []
    if ignored:
        message += f" (ignored, because they are for the first start: {', '.join(ignored)})"
    origin = newest.manifest.config.get("init_from")
    origin = origin.get("path") if isinstance(origin, dict) else None
    if init is not None and not (origin and _same_folder(origin, init.path)):
        first = f"from {origin}" if origin else "without init_from"
        message += f"; note: this run started {first}; to start from {init.path}, use another `save`"
    return Start("resume", newest, step, message)


def _fresh_message(options: CheckpointConfig) -> str:
    why = "`load` is not set" if options.load is None else "`load` and `save` are the same folder"
    empty = f' and "{options.save}" holds no complete checkpoint' if options.save is not None else ""
    note = " `finetune` is set but there is nothing to start from." if options.finetune else ""
    return f"fresh start with new weights: {why}{empty}.{note}"


def check_folder(key: str, folder: Path) -> None:
    """Raise `UserError` when `folder`, named by `key`, is not, and cannot become, one that this process may write."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{key}: {folder} is not a folder")
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"{key}: {folder} cannot be made: {os.path.relpath(there)} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{key}: {there} may not be written by this user")


def _same_folder(one: str | Path, other: str | Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
