"""The sample order of a run as its checkpoints keep it: the past does not change, only the future may.

`SavedOrder.write` makes the JSON-able record (version 3). `SavedOrder.read` reads it, version 2, which did not know
what is in the files, and version 1, which knew one phase only. A resumed run may add sources whose weight in the past
is 0, and change the weights of later steps; whatever would change what it has read is refused, with every difference.

A run that starts from another run's checkpoint (`init_from`) may inherit its order (`SavedOrder.inherit`), and with it
the past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from megatron.data.order.phases import Phase, Progress, Weights, alike, phases_before, phases_from, steps_and_weights
from megatron.data.packing import Segment
from megatron.data.tokens.indexed import FileIdentity
from megatron.errors import UserError

STATE_VERSION = 3


@dataclass(frozen=True)
class SavedSource:
    """What a checkpoint knows of a source.

    Attributes:
        name, prefix: its name, and where its files were.
        key: hash of what its order depends on besides the segments.
        segments: its order.
        labels: whether it was trained with labels; None: not recorded.
        most: samples that its cap allowed; None: any number.
        files: its files of tokens, then those of its labels; None: not recorded.
    """

    name: str
    prefix: str
    key: str
    segments: tuple[Segment, ...]
    labels: bool | None = None
    most: int | None = None
    files: tuple[FileIdentity, ...] | None = None

    def replaced_by(self, other: SavedSource) -> list[tuple[FileIdentity, FileIdentity]]:
        """The files whose content is another in `other`: (here, there). Empty when they cannot be compared: the files
        of either are not recorded, or the same documents are in another number of them."""
        if self.files is None or other.files is None or len(self.files) != len(other.files):
            return []
        return [(a, b) for a, b in zip(self.files, other.files, strict=True) if a[1:] != b[1:]]


@dataclass(frozen=True)
class SavedRole:
    """One role of a run: `samples` that were planned (None: not recorded), its sources and phases."""

    samples: int | None
    sources: tuple[SavedSource, ...]
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class SavedOrder:
    """The order of a run.

    Attributes:
        start: its first step, and the samples consumed before it (`Progress.start`).
        taken: how many of the samples consumed before the checkpoint each source of steps had given (forget_steps);
            empty: all are training data.
        remedy: how to begin a new order instead, for the errors about a change of this one.
    """

    roles: Mapping[str, SavedRole] = field(default_factory=dict)
    start: tuple[int, int] = (0, 0)
    remedy: str = ""
    taken: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def read(record: Mapping[str, Any] | None) -> SavedOrder:
        """From a checkpoint; empty for a fresh start. Raises `UserError` for a newer version."""
        if not record:
            return SavedOrder()
        version = record["version"]
        if version not in (1, 2, STATE_VERSION):
            raise UserError(
                f"the checkpoint's data state has version {version}; this program reads up to {STATE_VERSION}. "
                "Resume with the newer program that wrote it."
            )
        role = _role_of_version_1 if version == 1 else _role
        step, samples = record.get("begun", (0, 0))
        roles = {name: role(saved) for name, saved in record["roles"].items()}
        return SavedOrder(roles, (step, samples), taken=record.get("taken", {}))

    def write(self) -> dict[str, Any]:
        """The JSON-able record for a checkpoint."""
        roles = {
            name: {
                "samples": role.samples,
                "sources": [asdict(source) for source in role.sources],
                "phases": [asdict(phase) for phase in role.phases],
            }
            for name, role in self.roles.items()
        }
        taken = {"taken": dict(self.taken)} if self.taken else {}
        return {"version": STATE_VERSION, "roles": roles, "begun": list(self.start), **taken}

    def inherit(self, old_step: int, start: tuple[int, int]) -> SavedOrder:
        """The order with which a new run begins after step `old_step` of this one; `start` is the new run's.

        Steps are counted as in the new run, so that those of the past may become negative.
        """
        shift = start[0] - old_step
        roles = {
            name: replace(role, phases=tuple(replace(phase, step=phase.step + shift) for phase in role.phases))
            for name, role in self.roles.items()
        }
        return SavedOrder(roles, start, taken=self.taken)


def _role(record: Mapping[str, Any]) -> SavedRole:
    sources = tuple(
        SavedSource(
            **{
                **one,
                "segments": _segments(one["segments"]),
                "files": tuple(map(tuple, files)) if (files := one.get("files")) is not None else None,
            }
        )
        for one in record["sources"]
    )
    phases = tuple(
        Phase(phase["step"], phase["first"], tuple(phase["weights"]), tuple(phase["asked"]))
        for phase in record["phases"]
    )
    return SavedRole(record["samples"], sources, phases)


def _role_of_version_1(sources: Sequence[Mapping[str, Any]]) -> SavedRole:
    found = tuple(SavedSource(one["prefix"], one["prefix"], one["key"], _segments(one["segments"])) for one in sources)
    return SavedRole(None, found, (Phase.constant([source["weight"] for source in sources]),))


def _segments(records: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
    return tuple(Segment(**record) for record in records)


def match_sources(
    saved: Sequence[SavedSource], now: Sequence[SavedSource], *, replaced: bool = False
) -> list[int | None]:
    """For each saved source its place among the present ones, by content: its files may have moved.

    If several have the same sizes and content, prefix, name and order decide. `replaced`: one of the same sizes and
    another content is found as well, where there is none of the same.
    """
    places: list[int | None] = [None] * len(saved)
    for other, alike_by in product((False, True) if replaced else (False,), ("prefix", "name", "key")):
        for d, old in enumerate(saved):
            left = (
                i
                for i in range(len(now))
                if i not in places and now[i].key == old.key and (other or not old.replaced_by(now[i]))
            )
            if places[d] is None:
                places[d] = next((i for i in left if getattr(now[i], alike_by) == getattr(old, alike_by)), None)
    return places


def check_sources(
    saved: SavedRole, now: Sequence[SavedSource], progress: Progress, remedy: str = ""
) -> list[int | None]:
    """`match_sources`. Raises `UserError` when a source that was drawn from is missing or changed.

    `remedy`: see `SavedOrder`.
    """
    places = match_sources(saved.sources, now, replaced=True)
    faults: list[str] = []
    for d, (old, place) in enumerate(zip(saved.sources, places, strict=True)):
        if not any(phase.weights[d] > 0 for phase in saved.phases if phase.step < progress.steps):
            continue  # it was not read
        if place is not None and (replaced := old.replaced_by(now[place])):
            faults.extend(
                f"  {there[0]} was replaced: expected {here[1]} bytes with a sample of CRC-32 {here[2]} as in the "
                f"checkpoint ({here[0]} then), found {there[1]} bytes with {there[2]}"
                for here, there in replaced
            )
        elif place is None:
            others = [source for i, source in enumerate(now) if i not in places]
            faults.append(f"  {_describe_change(old, others, len(now))}")
        elif old.labels is not None and old.labels != now[place].labels:
            had, has = ("labels", "none") if old.labels else ("no labels", "some")
            faults.append(f"  {now[place].prefix} had {had} in the checkpoint, now {has}")
    if faults:
        lines = "\n".join(faults)
        raise UserError(
            f"training data that this run has read is missing or changed:\n{lines}\n"
            "Keep every source that was drawn from in the list, unchanged; weight 0 from now on stops it, and new "
            f"data is a new source. {remedy}"
        )
    return places


def _describe_change(old: SavedSource, others: Sequence[SavedSource], now: int) -> str:
    """Why a source is not found. `others`: those of `now` sources that match no source of the checkpoint."""
    for source in others:
        if source.prefix == old.prefix or source.name == old.name:
            changed = "documents, their range or labels, pack_impl or seq_length"
            return f"{source.prefix}: {changed} changed since the checkpoint"
    return f"{old.prefix}: is no longer among the {now} sources"


def check_past(
    saved: SavedRole,
    wanted: Sequence[tuple[int, Weights]],
    names: Sequence[str],
    progress: Progress,
    named_mixture: bool = False,
    remedy: str = "",
) -> None:
    """Raise `UserError` when `wanted` differs from the checkpoint in steps that are done.

    Args:
        saved: with one weight for each of `names` in its phases.
        wanted: (step, weights) pairs of the configuration.
        named_mixture: they are given by name; for the message.
        remedy: see `SavedOrder`.
    """
    ours = phases_from(steps_and_weights(saved.phases), progress.start[0])  # without an earlier run's
    was, is_now = phases_before(ours, progress.steps), phases_before(wanted, progress.steps)
    if len(was) == len(is_now) and all(a[0] == b[0] and alike(a[1], b[1]) for a, b in zip(was, is_now, strict=True)):
        return
    borders = sorted({step for step, _ in [*was, *is_now]})
    lines = []
    for step, end in zip(borders, [*borders[1:], progress.steps], strict=True):
        old, new = _weights_at(was, step), _weights_at(is_now, step)
        differs = [d for d in range(len(names)) if abs(old[d] - new[d]) > 1e-12]
        if differs:
            changes = ", ".join(f"{names[d]} {old[d]:.4g} in the checkpoint, {new[d]:.4g} now" for d in differs)
            lines.append(f"  steps {step} to {end - 1}: {changes}")
    future = [(step, weights) for step, weights in wanted if step >= progress.steps]
    if not future or future[0][0] > progress.steps:
        future.insert(0, (progress.steps, _weights_at(wanted, progress.steps)))
    key = "mixture.weights" if named_mixture else "train_data_weights"
    # Every list begins at 0, also that of a run whose steps do not.
    all_pairs = [(step if i else 0, weights) for i, (step, weights) in enumerate([*was, *future])]
    pairs = ", ".join(f"[{step}, {_format_weights(weights, names, named_mixture)}]" for step, weights in all_pairs)
    order = "" if named_mixture else f" (in the order {', '.join(names)})"
    allowed = f"Only steps from {progress.steps} on may have new ones: write [{pairs}]{order}."
    raise UserError("\n".join([f"{key}: the weights of past steps cannot change:", *lines, f"{allowed} {remedy}"]))


def _format_weights(weights: Weights, names: Sequence[str], named: bool) -> str:
    """Weights as YAML: a list, or by name without those that are 0."""
    if not named:
        return f"[{', '.join(f'{weight:.6g}' for weight in weights)}]"
    pairs = (f"{name}: {weight:.6g}" for name, weight in zip(names, weights, strict=True) if weight)
    return "{" + ", ".join(pairs) + "}"


def _weights_at(pairs: Sequence[tuple[int, Weights]], step: int) -> Weights:
    return next(weights for start, weights in reversed(pairs) if start <= step)
