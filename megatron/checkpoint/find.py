"""Find and open checkpoints: which ones a folder holds, which of them are complete. Imports no torch.

A checkpoint is opened once: what needs it is passed the `Checkpoint`, which knows the manifest and who wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.hugging_face import find_published, published_identity
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.neox_folder import is_neox_folder
from megatron.checkpoint.plain import read_plain
from megatron.checksums import file_crc32
from megatron.errors import UserError
from megatron.files import read_json, write_atomically

_BY_NEOX = "written by GPT-NeoX"
Damaged = Mapping[Path, str]
"""Folders whose content was found damaged, and what is wrong."""
NONE_DAMAGED: Damaged = MappingProxyType({})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder, `<save>/global_step<N>`.
        manifest: what it holds; GPT-NeoX writes none, so there only the step is known.
        by_neox: whether GPT-NeoX wrote it (neox_run.py reads how far its run has come).
        published: what names it for good when it is a Hugging Face model (hugging_face.py): nothing is known of it here
            but its folder; None for a checkpoint.
        skipped: newer folders next to it that it was taken in place of, as the latest: name → what is wrong.
    """

    path: Path
    manifest: Manifest
    by_neox: bool = False
    published: str | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def foreign(self) -> bool:
        """Whether it has neither a manifest nor checksums of its files, as others' models."""
        return self.by_neox or self.published is not None

    @property
    def skipped_note(self) -> str:
        """The `skipped` ones, to be added to a message; empty when there are none."""
        named = ", ".join(f"{name} ({why})" for name, why in self.skipped.items())
        return f"; newer checkpoints are damaged or incomplete: {named}" if named else ""

    @property
    def callbacks(self) -> Mapping[str, Any]:
        """What the callbacks of the run saved, by name: plain values, without tensors.

        Raises `UserError` when the state file is damaged or is not that of the manifest.
        """
        if self.state_problem:
            raise UserError(f"{self.path} is damaged: {self.state_problem}. {advise_others(self.path)}")
        return self._state[0]

    @property
    def state_problem(self) -> str | None:
        """What is wrong with the state file, in words; None when nothing is."""
        return self._state[1]

    @cached_property
    def _state(self) -> tuple[Mapping[str, Any], str | None]:
        """`callbacks` and `state_problem`; the small file is compared whatever `checkpoint_checksums` is."""
        if self.foreign:
            return {}, None
        name, found = layout.state_file(0), self.manifest
        if problem := found.wrong_file(self.path, name):
            return {}, problem
        try:
            state = read_plain(self.path / name)
        except UserError as error:
            return {}, str(error)
        if (state.get("iteration"), state.get("global_samples")) != (found.step, found.consumed):
            return {}, (
                f"{layout.MANIFEST} has step {found.step} and {found.consumed} samples, {name} has "
                f"{state.get('iteration')} and {state.get('global_samples')}"
            )
        callbacks = (state.get("client") or {}).get("callbacks", {})
        return callbacks if isinstance(callbacks, dict) else {}, None

    def check_files(self, checksums: bool = False) -> None:
        """Every file is there with its size and, if asked, its CRC-32. Raises `UserError` naming the first that is
        not."""
        if problem := self.manifest.missing(self.path, checksums):
            raise UserError(f"{self.path} is not a complete checkpoint: {problem}")


def identity(folder: Path) -> int | None:
    """CRC-32 of a checkpoint's manifest, or of a Hugging Face model: another one that takes its place has another. None
    when none is there, or GPT-NeoX's."""
    with suppress(OSError):
        return file_crc32(folder / layout.MANIFEST)
    with suppress(OSError):
        return published_identity(folder)
    return None


def open_checkpoint(folder: str | Path, key: str | None = None, damaged: Damaged = NONE_DAMAGED) -> Checkpoint:
    """The checkpoint in `folder`, or the Hugging Face model there or of that name. Raises `UserError` when it is not
    complete; `key` is what named the folder."""
    if (published := _published(folder, key or "load")) is not None:
        return published
    found = _examine(Path(folder), damaged)
    if isinstance(found, str):
        named = f"{key}: " if key else ""
        raise UserError(f"{named}{folder} is not a complete checkpoint: {found}. {advise_others(Path(folder))}")
    return found


def _published(named: str | Path, key: str) -> Checkpoint | None:
    """The Hugging Face model that `key` names, as a checkpoint of step 0; None when it names none."""
    model = find_published(named, key)
    return None if model is None else Checkpoint(model.folder, Manifest.empty(0), published=model.name)


def advise_others(folder: Path) -> str:
    """Which checkpoints can be used instead of the one in `folder`: a sentence for a message."""
    steps = [step for step in list_checkpoints(folder.parent).steps if step != layout.step_of(folder.name)]
    if not steps:
        return f"There is no other complete checkpoint in {folder.parent}."
    named = f"iteration={steps[-1]} (or name {folder.parent / layout.step_folder(steps[-1])})"
    return f"Complete steps next to it: {steps}; use {named}."


def _examine(folder: Path, damaged: Damaged) -> Checkpoint | str:
    """The checkpoint in a folder, or what is wrong with it."""
    if folder in damaged:
        return damaged[folder]
    if is_neox_folder(folder):
        return Checkpoint(folder, Manifest.empty(layout.step_of(folder.name) or 0), by_neox=True)
    if not (folder / layout.MANIFEST).is_file():
        return f"no {layout.MANIFEST}"
    try:
        manifest = Manifest.read(folder)
    except UserError as error:
        return str(error)
    return manifest.missing(folder) or Checkpoint(folder, manifest)


@dataclass(frozen=True)
class Listing:
    """The checkpoints in a folder.

    Attributes:
        root: the folder (it need not exist).
        checkpoints: the complete ones by step, ascending.
        incomplete: folders named like a checkpoint that are not complete: name → what is wrong.
        abandoned: the complete ones of a line that a run went back from: they stay until they are replaced.
        latest: the step to resume from: of the others the highest one not above the step that the file `latest` names;
            the highest of all where there is none or no such file.
    """

    root: Path
    checkpoints: Mapping[int, Checkpoint] = field(default_factory=dict)
    incomplete: Mapping[str, str] = field(default_factory=dict)
    abandoned: frozenset[int] = frozenset()
    latest: int | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.checkpoints)

    @property
    def holds_neox(self) -> bool:
        """Whether GPT-NeoX's checkpoints were left out."""
        return _BY_NEOX in self.incomplete.values()

    def choose(self, iteration: int | None, key: str) -> Checkpoint:
        """The checkpoint of `iteration` (None: the latest; it knows what was `skipped`).

        Raises `UserError` listing what there is.
        """
        if not self.root.is_dir():
            raise UserError(f"{key}: {self.describe()}; give a global_step<N> folder or a save folder")
        step = self.latest if iteration is None else iteration
        if step in self.checkpoints:
            newer = {name: why for name, why in self.incomplete.items() if (layout.step_of(name) or 0) > step}
            return replace(self.checkpoints[step], skipped=newer if iteration is None else {})
        wanted = "no checkpoint" if iteration is None else f"no complete checkpoint of iteration {iteration}"
        raise UserError(f"{key}: {wanted} in {self.root}: {self.describe()}")

    def describe(self) -> str:
        """What the folder holds, for error messages."""
        if not self.root.is_dir():
            return f"folder {self.root} does not exist"
        parts = [f"complete steps: {list(self.steps)}" if self.steps else "no complete checkpoint"]
        if self.abandoned:
            parts.append(f"of a line that the run went back from: {sorted(self.abandoned)}")
        if self.incomplete:
            parts.append("incomplete: " + ", ".join(f"{name} ({why})" for name, why in self.incomplete.items()))
        if not self.steps and not self.incomplete:
            entries = sorted(entry.name for entry in self.root.iterdir() if not entry.name.startswith("."))
            shown = ", ".join(entries[:10]) + (", ..." if len(entries) > 10 else "")
            parts.append(f"it holds {shown}" if entries else "it is empty")
        return "; ".join(parts)


def list_checkpoints(root: str | Path, neox: bool = False, damaged: Damaged = NONE_DAMAGED) -> Listing:
    """Open every checkpoint in `root`. `neox`: folders that GPT-NeoX wrote count too, for those who take weights.

    `damaged`: folders that are known not to be complete, and why.
    """
    root = Path(root)
    if not root.is_dir():
        return Listing(root)
    complete: dict[int, Checkpoint] = {}
    incomplete: dict[str, str] = {}
    for entry in sorted(root.iterdir()):
        step = layout.step_of(entry.name)
        if step is None or not entry.is_dir():
            continue
        found = _examine(entry, damaged)
        if isinstance(found, str):
            incomplete[entry.name] = found
        elif found.by_neox and not neox:
            incomplete[entry.name] = _BY_NEOX
        else:
            complete[step] = found
    named = _step_in_latest(root)
    abandoned = _abandoned(root, complete)
    line = complete.keys() - abandoned
    before = [step for step in line if named is not None and step <= named]
    latest = max(before or line, default=None)
    return Listing(root, dict(sorted(complete.items())), incomplete, abandoned, latest)


def abandon_after(root: Path, step: int) -> None:
    """Record that the run in `root` goes on from the checkpoint of `step`: later ones are of a line that is abandoned.

    Raises `OSError`.
    """
    later = any((layout.step_of(path.name) or 0) > step for path in root.glob("global_step*"))
    if not later and not (root / layout.ABANDONED).exists():
        return  # as nearly always: nothing has to be opened
    found = list_checkpoints(root)
    left = {one for one in found.steps if one > step} | (found.abandoned - {step})
    if left != found.abandoned:
        record = {layout.step_folder(one): identity(found.checkpoints[one].path) for one in sorted(left)}
        write_atomically(root / layout.ABANDONED, json.dumps(record, indent=1) + "\n")


def _abandoned(root: Path, complete: Mapping[int, Checkpoint]) -> frozenset[int]:
    """Which of the checkpoints the record names, and nothing has replaced since; none where it cannot be read."""
    recorded: dict[str, Any] = {}
    with suppress(OSError, UserError):
        recorded = read_json(root / layout.ABANDONED)
    named = {step: one for step, one in complete.items() if one.path.name in recorded}
    return frozenset(step for step, one in named.items() if identity(one.path) == recorded[one.path.name])


def _step_in_latest(root: Path) -> int | None:
    try:
        return layout.step_of((root / layout.LATEST).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None


def find_checkpoint(
    root: str | Path, iteration: int | None = None, key: str = "load", damaged: Damaged = NONE_DAMAGED
) -> Checkpoint:
    """The checkpoint `iteration` (None: the latest) in `root`; a `global_step<N>` folder itself also does, and so does
    a Hugging Face model, a folder or one of the Hub, which has no iterations.

    For evaluation, generation and tools, which take weights only, so one of GPT-NeoX's also does, whatever its name.
    Raises `UserError` listing what there is.
    """
    if (published := _published(root, key)) is not None:
        if iteration is not None:
            raise UserError(
                f"iteration: {iteration}, but {key} names the Hugging Face model {root}, which has one state; leave "
                "the key out (a revision of a model of the Hub: owner/name@REVISION)"
            )
        return published
    root = Path(root)
    step = layout.step_of(root.name)
    if iteration in (None, step) and root.is_dir() and (step is not None or is_neox_folder(root)):
        return open_checkpoint(root, key, damaged)
    return list_checkpoints(root, True, damaged).choose(iteration, key)
