"""Which checkpoints a folder holds, and where a run starts (rules: documentation/checkpoints.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.neox_folder import WEIGHTS_ONLY, is_neox_folder
from megatron.errors import UserError
from megatron.neox_arguments.schema_train import CheckpointConfig


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder.

    Attributes:
        root: the folder (it need not exist).
        steps: steps of the complete checkpoints, ascending.
        incomplete: folders named like a checkpoint that are not complete: name → what is wrong.
        latest: the step to continue from: what `latest` names when that is complete, else the highest step.
    """

    root: Path
    steps: tuple[int, ...] = ()
    incomplete: dict[str, str] = field(default_factory=dict)
    latest: int | None = None

    def path(self, step: int) -> Path:
        return self.root / layout.step_folder(step)

    def describe(self) -> str:
        """What is there, for error messages."""
        if not self.root.is_dir():
            return f"there is no folder {self.root}"
        parts = [f"complete steps: {list(self.steps)}" if self.steps else "no complete checkpoint"]
        if self.incomplete:
            parts.append("incomplete: " + ", ".join(f"{name} ({why})" for name, why in self.incomplete.items()))
        if not self.steps and not self.incomplete:
            entries = sorted(entry.name for entry in self.root.iterdir() if not entry.name.startswith("."))
            shown = ", ".join(entries[:10]) + (", ..." if len(entries) > 10 else "")
            parts.append(f"it holds {shown}" if entries else "it is empty")
            if "config.json" in entries:
                parts.append("this looks like a Hugging Face folder, not a checkpoint of Deepy")
        return "; ".join(parts)


def list_checkpoints(root: str | Path, neox: bool = False) -> Listing:
    """Look into `root`: complete and incomplete checkpoints (every file is there with its size) and the latest.

    `neox`: folders that GPT-NeoX wrote count too, for those who take weights only.
    """
    root = Path(root)
    if not root.is_dir():
        return Listing(root)
    steps, incomplete = [], {}
    for entry in sorted(root.iterdir()):
        step = layout.step_of(entry.name)
        if step is None or not entry.is_dir():
            continue
        problem = None if neox and is_neox_folder(entry) else what_is_wrong(entry)
        if problem is None:
            steps.append(step)
        else:
            incomplete[entry.name] = problem
    steps.sort()
    named = _named_by_latest(root)
    latest = named if named in steps else (steps[-1] if steps else None)
    return Listing(root, tuple(steps), incomplete, latest)


def what_is_wrong(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint, in words; None when it is one."""
    if is_neox_folder(folder):
        return "written by GPT-NeoX"
    if not (folder / layout.MANIFEST).is_file():
        return f"no {layout.MANIFEST}"
    try:
        return Manifest.read(folder).missing(folder)
    except UserError as error:
        return str(error)


def _named_by_latest(root: Path) -> int | None:
    try:
        return layout.step_of((root / layout.LATEST).read_text(encoding="utf-8").strip())
    except OSError:
        return None


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
        kind: `fresh` (new weights), `continue` (from `save`), `load` (first start, from `load`), `finetune`
            (first start: weights of `load` only, step 0) or `init` (first start, from `init_from`).
        path: the checkpoint's folder; None when fresh.
        step: the step the run starts at.
        message: the decision in words, to be said aloud.
        init: what `init_from` says; None unless `kind` is `init`.
    """

    kind: str
    path: Path | None
    step: int
    message: str
    init: InitFrom | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it is the run of the checkpoint that goes on, with its schedule and the state of its loop."""
        return self.kind in ("continue", "load")

    @property
    def load_optim(self) -> bool:
        """Whether the optimizer's state belongs to this start."""
        return self.goes_on or (self.init is not None and self.init.optimizer == "keep")

    @property
    def load_data(self) -> bool:
        """Whether the order of the samples, and the number of those consumed, belong to this start."""
        return self.goes_on or (self.init is not None and self.init.data == "continue")

    @property
    def load_rng(self) -> bool:
        """Whether random states belong to this start: they go with the steps."""
        return self.goes_on or (self.init is not None and self.init.step == "continue")


def start_of(options: CheckpointConfig, *, to_write: bool = True) -> Start:
    """`decide_start` for the keys of a config."""
    init = InitFrom.of(options.init_from)
    return decide_start(options.save, options.load, options.iteration, options.finetune, init, to_write=to_write)


def decide_start(
    save: str | Path | None,
    load: str | Path | None,
    iteration: int | None = None,
    finetune: bool = False,
    init: InitFrom | None = None,
    *,
    to_write: bool = True,
) -> Start:
    """Where a training run starts; reads the two folders, changes nothing.

    * `save` holds a complete checkpoint: the run continues from it. `load`, `iteration`, `finetune` and `init_from`
      speak only of the first start. (When `load` names the same folder and the run that wrote the newest checkpoint
      was not itself started with this `iteration`, then this *is* the first start with it, and it is obeyed.)
    * else `init` must hold what is asked for.
    * else `load` unset or equal to `save`: a fresh start.
    * else `load` must hold what is asked for.

    Raises `UserError` listing what is there when the checkpoint asked for is missing or incomplete, and with `to_write`
    when `save` cannot be a folder to write in.
    """
    same = save is not None and load is not None and _same_folder(save, load)
    if save is not None:
        if to_write:
            _check_usable(Path(save))
        saved = list_checkpoints(save)
        if saved.latest is not None:
            if same and iteration is not None and not _started_with(saved, iteration):
                return _first_start(saved, iteration, finetune)
            return _continue(saved, load, iteration, finetune, init)
        _refuse_folder_of_neox(Path(save))
    if init is not None:
        return _from_another_run(save, init)
    if load is None or same:
        if iteration:
            where = f"{save} is empty of it: {list_checkpoints(save).describe()}" if save else "`load` is not set"
            raise UserError(f"iteration: {iteration} asks for a checkpoint, but {where}")
        return Start("fresh", None, 0, _fresh_message(save, load, finetune))
    if is_neox_folder(Path(load)) and iteration is None:
        return _with_weights_of_neox(Path(load), finetune)
    return _first_start(list_checkpoints(load, neox=True), iteration, finetune)


def find_checkpoint(root: str | Path, iteration: int | None = None, key: str = "load") -> Path:
    """The folder of checkpoint `iteration` (None: the latest) in `root`; a `global_step<N>` folder itself also does.

    For evaluation, generation and tools, which take weights only, so a folder of GPT-NeoX also does. Nothing there is
    always an error (`UserError` listing what is).
    """
    root = Path(root)
    if iteration in (None, layout.step_of(root.name)) and is_neox_folder(root):
        return root
    if layout.step_of(root.name) is not None and root.is_dir() and iteration in (None, layout.step_of(root.name)):
        if problem := what_is_wrong(root):
            raise UserError(f"{key}: {root} is not a complete checkpoint: {problem}")
        return root
    listing = list_checkpoints(root, neox=True)
    return listing.path(_chosen(listing, iteration, key))


def _chosen(listing: Listing, iteration: int | None, key: str) -> int:
    if iteration is None:
        if listing.latest is None:
            raise UserError(f"{key}: no checkpoint to load in {listing.root}: {listing.describe()}")
        return listing.latest
    if iteration not in listing.steps:
        raise UserError(
            f"{key}: {listing.root} has no complete checkpoint of iteration {iteration}: {listing.describe()}"
        )
    return iteration


def _first_start(listing: Listing, iteration: int | None, finetune: bool) -> Start:
    step = _chosen(listing, iteration, "load")
    path = listing.path(step)
    if is_neox_folder(path):
        return _with_weights_of_neox(path, finetune)
    if finetune:
        return Start("finetune", path, 0, f"starting at step 0 with the weights of {path} (finetune)")
    asked = "iteration" if iteration is not None else "latest"
    return Start("load", path, step, f"loading {path} (asked for by {asked}): the run goes on at step {step}")


def _with_weights_of_neox(path: Path, finetune: bool) -> Start:
    if not finetune:
        raise UserError(
            f"load: {path} was written by GPT-NeoX. {WEIGHTS_ONLY}, or use init_from: {{path: {path}, optimizer: reset,"
            " data: restart, step: continue} in the place of load to count the steps on"
        )
    message = f"starting at step 0 with the weights of {path}, written by GPT-NeoX (finetune); the optimizer is new"
    return Start("finetune", path, 0, message)


def _refuse_folder_of_neox(save: Path) -> None:
    """A new run among the checkpoints of GPT-NeoX would look like theirs going on. Raises `UserError`."""
    if list_checkpoints(save, neox=True).steps:
        raise UserError(
            f"save: {save} holds checkpoints of GPT-NeoX. {WEIGHTS_ONLY}: name this folder in `load`, and another one "
            "in `save`"
        )


def _from_another_run(save: str | Path | None, init: InitFrom) -> Start:
    path = find_checkpoint(init.path, init.iteration, "init_from")
    if save is not None and os.path.realpath(save) in (os.path.realpath(path), os.path.realpath(path.parent)):
        raise UserError(f"init_from: {init.path} lies in `save`; a run that begins from another needs one of its own")
    if is_neox_folder(path) and (init.optimizer, init.data) != ("reset", "restart"):
        raise UserError(
            f"init_from: {path} was written by GPT-NeoX, whose optimizer state and order of samples are not read; set "
            "init_from.optimizer=reset and init_from.data=restart"
        )
    manifest = Manifest.read(path)
    message = f"beginning from {path} (init_from): {init.told(manifest)}"
    return Start("init", path, init.first_step(manifest), message, init)


def _continue(
    saved: Listing, load: str | Path | None, iteration: int | None, finetune: bool, init: InitFrom | None
) -> Start:
    step = saved.latest
    assert step is not None
    path = saved.path(step)
    message = f"continuing from {path} at step {step}"
    ignored = [
        text
        for text, given in (
            (f"load: {load}", load is not None and not _same_folder(load, saved.root)),
            (f"iteration: {iteration}", iteration is not None and iteration != step),
            ("finetune", finetune),
            (f"init_from: {init.path}" if init else "", init is not None),
        )
        if given
    ]
    if ignored:
        message += f" ({', '.join(ignored)} spoke of the first start, which has been)"
    came_from = _came_from(saved)
    if init is not None and not (came_from and _same_folder(came_from, init.path)):
        whence = f"from {came_from}" if came_from else "without init_from"
        message += f"; mind that this run began {whence}: to begin from {init.path}, use another `save`"
    if saved.incomplete:
        message += f"; incomplete folders are ignored: {', '.join(sorted(saved.incomplete))}"
    return Start("continue", path, step, message)


def _fresh_message(save: str | Path | None, load: str | Path | None, finetune: bool) -> str:
    why = "`load` is not set" if load is None else "`load` and `save` are the same folder"
    empty = f" and {save} holds no complete checkpoint" if save is not None else ""
    note = " `finetune` is set but there is nothing to start from." if finetune else ""
    return f"fresh start with new weights: {why}{empty}.{note}"


def _check_usable(save: Path) -> None:
    """Raise `UserError` when `save` is not, and cannot become, a folder that this process may write."""
    if save.exists() and not save.is_dir():
        raise UserError(f"save: {save} is not a folder")
    there = next(path for path in (save, *save.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise UserError(f"save: {save} cannot be made: {os.path.relpath(there)} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"save: {there} may not be written by this user")


def _started_with(saved: Listing, iteration: int) -> bool:
    """Whether the run that wrote the latest checkpoint was itself started at `iteration` by request."""
    assert saved.latest is not None
    config: dict[str, Any] = Manifest.read(saved.path(saved.latest)).config
    return config.get("iteration") == iteration


def _came_from(saved: Listing) -> str | None:
    """The other run that the run of the latest checkpoint began from."""
    assert saved.latest is not None
    return (Manifest.read(saved.path(saved.latest)).config.get("init_from") or {}).get("path")


def _same_folder(one: str | Path, other: str | Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
