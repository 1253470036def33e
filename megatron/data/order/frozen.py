"""The sample order of a run, kept in its checkpoints: what is past stays, only the future may change.

`DataPlan.state()` writes the record (version 2), `read_state` reads it and version 1, which knew one phase only. A run
that goes on may add sources whose weight in the past is 0, and change the weights of steps to come; whatever would
change what it has read is refused, with every difference.

A run that begins from another run's checkpoint takes over its record (`handed_over`), and with it the past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron.data.order.phases import Phase, Progress, Weights, alike, before, since, steps_and_weights
from megatron.data.packing.contract import Segment
from megatron.errors import UserError

STATE_VERSION = 2

_NEW_ORDER = "A new order of the data begins in another `save`, with finetune: true or init_from: {data: restart}."


@dataclass(frozen=True)
class FrozenSource:
    """What a checkpoint knows of a source.

    Attributes:
        name, prefix: as it was called, where it was.
        key: hash of what its order depends on besides the segments.
        segments: its order.
        labels: whether it was trained with labels; None: not recorded.
        most: samples that its cap allowed; None: any number.
    """

    name: str
    prefix: str
    key: str
    segments: tuple[Segment, ...]
    labels: bool | None = None
    most: int | None = None

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class FrozenRole:
    """One role of a run: `samples` that were planned (None: not recorded), its sources and phases."""

    samples: int | None
    sources: tuple[FrozenSource, ...]
    phases: tuple[Phase, ...]

    def record(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "sources": [source.record() for source in self.sources],
            "phases": [asdict(phase) for phase in self.phases],
        }


def write_state(roles: Mapping[str, FrozenRole], begun: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """The JSON-able record for a checkpoint. `begun`: see `Progress`."""
    records = {name: role.record() for name, role in roles.items()}
    return {"version": STATE_VERSION, "roles": records, "begun": list(begun)}


def begun_at(state: Mapping[str, Any] | None) -> tuple[int, int]:
    """The first step of the run that a record is of, and the samples consumed before it: `Progress.begun`."""
    step, samples = (state or {}).get("begun", (0, 0))
    return step, samples


def handed_over(state: Mapping[str, Any] | None, old_step: int, begun: tuple[int, int]) -> dict[str, Any]:
    """The record with which a new run begins where another one stands.

    Args:
        state: the record of the other run, whose samples go on; None when this run reads in an order of its own.
        old_step: the step that the other run has come to.
        begun: the new run's first step, and the samples consumed before it.

    Steps are counted as in the new run, so that those of the past may become negative.
    """
    by = begun[0] - old_step
    roles = {
        name: replace(role, phases=tuple(replace(phase, step=phase.step + by) for phase in role.phases))
        for name, role in read_state(state).items()
    }
    return write_state(roles, begun)


def read_state(state: Mapping[str, Any] | None) -> dict[str, FrozenRole]:
    """The roles of a record; none for a fresh start. Raises `UserError` for a version from the future."""
    if not state:
        return {}
    if state["version"] == 1:
        return {name: _role_of_version_1(sources) for name, sources in state["roles"].items()}
    if state["version"] != STATE_VERSION:
        raise UserError(
            f"the checkpoint's data state has version {state['version']}, this program reads up to {STATE_VERSION}."
        )
    return {name: _role(record) for name, record in state["roles"].items()}


def _role(record: Mapping[str, Any]) -> FrozenRole:
    sources = tuple(
        FrozenSource(**{**source, "segments": _segments(source["segments"])}) for source in record["sources"]
    )
    phases = tuple(
        Phase(phase["step"], phase["first"], tuple(phase["weights"]), tuple(phase["asked"]))
        for phase in record["phases"]
    )
    return FrozenRole(record["samples"], sources, phases)


def _role_of_version_1(sources: Sequence[Mapping[str, Any]]) -> FrozenRole:
    found = tuple(
        FrozenSource(source["prefix"], source["prefix"], source["key"], _segments(source["segments"]))
        for source in sources
    )
    return FrozenRole(None, found, (Phase.constant([source["weight"] for source in sources]),))


def _segments(records: Sequence[Mapping[str, Any]]) -> tuple[Segment, ...]:
    return tuple(Segment(**record) for record in records)


def same_data(saved: Sequence[FrozenSource], now: Sequence[FrozenSource]) -> list[int | None]:
    """For each saved source its place among those of now, by what it holds: its files may have moved.

    Several may hold the same, as far as sizes tell: then the place and the name of the files decide, and the order.
    """
    places: list[int | None] = [None] * len(saved)
    for alike_by in ("prefix", "name", "key"):
        for d, old in enumerate(saved):
            left = (i for i in range(len(now)) if i not in places and now[i].key == old.key)
            if places[d] is None:
                places[d] = next((i for i in left if getattr(now[i], alike_by) == getattr(old, alike_by)), None)
    return places


def check_sources(saved: FrozenRole, now: Sequence[FrozenSource], progress: Progress) -> list[int | None]:
    """`same_data`, after refusing that a source which was drawn from is gone, or was changed, since the checkpoint."""
    places = same_data(saved.sources, now)
    faults = []
    for d, (old, place) in enumerate(zip(saved.sources, places, strict=True)):
        if not any(phase.weights[d] > 0 for phase in saved.phases if phase.step < progress.steps):
            continue  # nothing of it was read
        if place is None:
            others = [source for i, source in enumerate(now) if i not in places]
            faults.append(f"  {_what_became_of(old, others, len(now))}")
        elif old.labels is not None and old.labels != now[place].labels:
            had, has = ("labels", "none") if old.labels else ("no labels", "some")
            faults.append(f"  {now[place].prefix} had {had} in the checkpoint, now {has}")
    if faults:
        lines = "\n".join(faults)
        raise UserError(
            f"the training data that this run has read is not there as it was:\n{lines}\n"
            "Every source that was drawn from stays in the list, unchanged; weight 0 from now on stops it, and new "
            f"data is a new source. {_NEW_ORDER}"
        )
    return places


def _what_became_of(old: FrozenSource, others: Sequence[FrozenSource], now: int) -> str:
    """In words, why a source is not found. `others`: those of `now` sources that none of the checkpoint's is."""
    for source in others:
        if source.prefix == old.prefix or source.name == old.name:
            changed = "documents, their range or labels, pack_impl or seq_length"
            return f"{source.prefix}: {changed} changed since the checkpoint"
    return f"{old.prefix}: is no longer among the {now} sources"


def check_past(
    saved: FrozenRole,
    wanted: Sequence[tuple[int, Weights]],
    names: Sequence[str],
    progress: Progress,
    named_mixture: bool = False,
) -> None:
    """Refuse that `wanted` says something else about the steps that are done than the checkpoint does.

    Args:
        saved: with one weight for each of `names` in its phases.
        wanted: (step, weights) pairs of the configuration.
        named_mixture: it says them by name; for the message.
    """
    ours = since(steps_and_weights(saved.phases), progress.begun[0])  # a run before this one is no longer spoken of
    was, is_now = before(ours, progress.steps), before(wanted, progress.steps)
    if len(was) == len(is_now) and all(a[0] == b[0] and alike(a[1], b[1]) for a, b in zip(was, is_now, strict=True)):
        return
    borders = sorted({step for step, _ in [*was, *is_now]})
    lines = []
    for step, end in zip(borders, [*borders[1:], progress.steps], strict=True):
        old, new = _at(was, step), _at(is_now, step)
        differs = [d for d in range(len(names)) if abs(old[d] - new[d]) > 1e-12]
        if differs:
            told = ", ".join(f"{names[d]} {old[d]:.4g} in the checkpoint, {new[d]:.4g} now" for d in differs)
            lines.append(f"  steps {step} to {end - 1}: {told}")
    future = [(step, weights) for step, weights in wanted if step >= progress.steps]
    if not future or future[0][0] > progress.steps:
        future.insert(0, (progress.steps, _at(wanted, progress.steps)))
    was[0] = (0, was[0][1])  # where every list begins, also that of a run whose steps do not
    key = "mixture.weights" if named_mixture else "train_data_weights"
    # Every list begins at 0, also that of a run whose steps do not.
    all_pairs = [(step if i else 0, weights) for i, (step, weights) in enumerate([*was, *future])]
    pairs = ", ".join(f"[{step}, {_written(weights, names, named_mixture)}]" for step, weights in all_pairs)
    order = "" if named_mixture else f" (in the order {', '.join(names)})"
    remedy = f"Only steps from {progress.steps} on may have new ones: write [{pairs}]{order}."
    raise UserError("\n".join([f"{key}: the weights of the past cannot change:", *lines, f"{remedy} {_NEW_ORDER}"]))


def _written(weights: Weights, names: Sequence[str], named: bool) -> str:
    """Weights as YAML: a list, or by name without those that are 0."""
    if not named:
        return f"[{', '.join(f'{weight:.6g}' for weight in weights)}]"
    pairs = (f"{name}: {weight:.6g}" for name, weight in zip(names, weights, strict=True) if weight)
    return "{" + ", ".join(pairs) + "}"


def _at(pairs: Sequence[tuple[int, Weights]], step: int) -> Weights:
    return next(weights for start, weights in reversed(pairs) if start <= step)
