"""Where two runs part: the first step whose metrics differ, then the first checkpoint, layer and tensor in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint, list_checkpoints
from megatron.checkpoint.reader import WEIGHT, CheckpointReader
from megatron.checkpoint.run_metrics import FILE, read_metrics
from megatron.errors import UserError
from megatron.log import ProgressBar
from megatron.mpu.sharding import unshard

# What a run measures of the machine differs in each run.
MACHINE = ("runtime/", "timers/", "memory/", "throughput/", "stragglers/")


@dataclass(frozen=True)
class Metric:
    """A number that the runs have of the same step, and that differs."""

    step: int
    name: str
    values: tuple[float, float]


@dataclass(frozen=True)
class TensorDifference:
    """A stored tensor that differs.

    Attributes:
        name: canonical name of its parameter.
        kind: `weight` in the training precision, `master` (its fp32 copy), or a moment of the optimizer.
        elements: how many differ, of how many; None when the shapes do.
        largest: difference of two elements in fp64.
    """

    name: str
    kind: str
    elements: tuple[int, int] | None
    largest: float

    def __str__(self) -> str:
        where = f"{self.kind} of {self.name}"
        if self.elements is None:
            return f"{where}: one run has no such tensor, or of another shape"
        return f"{where}: {self.elements[0]:,} of {self.elements[1]:,} elements, by at most {self.largest:.3g}"


@dataclass(frozen=True)
class Parting:
    """What two runs have in common, and where it ends.

    Attributes:
        metrics: those of the first step that differs, ascending by name.
        steps: of which both have metrics: first, last, how many; None when there are none.
        checkpoints: steps of which both have one.
        step: the first of these that differs.
        layer: its first layer with a tensor that differs, as numbered in its files.
        tensors: what differs in that layer.
    """

    metrics: tuple[Metric, ...]
    steps: tuple[int, int, int] | None
    checkpoints: tuple[int, ...]
    step: int | None = None
    layer: int | None = None
    tensors: tuple[TensorDifference, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.metrics and self.step is None


def diff_runs(one: Path, other: Path) -> Parting:
    """Compare two run folders (`save`): metrics of the steps that both have, then their checkpoints, of whatever
    layouts, bit for bit.

    Raises:
        UserError: a folder is missing, or the two have neither a step nor a checkpoint in common.
    """
    for folder in (one, other):
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; give the `save` folder of a run")
    metrics = [read_metrics(folder / FILE).by_step() for folder in (one, other)]
    both = sorted(metrics[0].keys() & metrics[1].keys())
    listings = [list_checkpoints(folder) for folder in (one, other)]
    common = [step for step in listings[0].steps if step in listings[1].steps]
    if not both and not common:
        raise UserError(f"{one} and {other} have no step in common: neither in {FILE} nor a complete checkpoint")
    parting = Parting(
        _first_metrics(metrics[0], metrics[1], both),
        (both[0], both[-1], len(both)) if both else None,
        tuple(common),
    )
    for step in common:
        found = _first_layer(*(listing.checkpoints[step] for listing in listings))
        if found:
            layer = layout.split_name(found[0].name)[0]
            return Parting(parting.metrics, parting.steps, parting.checkpoints, step, layer, tuple(found))
    return parting


def _first_metrics(
    one: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]], steps: list[int]
) -> tuple[Metric, ...]:
    for step in steps:
        names = sorted(name for name in one[step].keys() & other[step].keys() if not name.startswith(MACHINE))
        pairs = ((name, (one[step][name], other[step][name])) for name in names)
        found = tuple(Metric(step, name, values) for name, values in pairs if values[0] != values[1])
        if found:
            return found
    return ()


def _first_layer(one: Checkpoint, other: Checkpoint) -> list[TensorDifference]:
    """What differs in the first layer that does not hold the same in both."""
    readers = [CheckpointReader(checkpoint) for checkpoint in (one, other)]
    names = sorted({name for reader in readers for name in reader.names()}, key=layout.parameter_order)
    found: list[TensorDifference] = []
    with ProgressBar(f"comparing {one.path.name}", len(names), "tensors") as progress:
        for name in names:
            if found and layout.split_name(name)[0] != layout.split_name(found[0].name)[0]:
                break
            found += _differences(readers, name)
            progress(1)
    return found


def _differences(readers: list[CheckpointReader], name: str) -> Iterator[TensorDifference]:
    """Of one parameter: its weight, master and moments."""
    one, other = (_tensors(reader, name) for reader in readers)
    for kind in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(kind), other.get(kind)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            yield TensorDifference(name, kind, None, float("nan"))
            continue
        differs = mine.ne(theirs) & ~(mine.isnan() & theirs.isnan())
        if count := int(differs.sum()):
            largest = float((mine.double() - theirs.double()).abs().nan_to_num(float("inf")).max())
            yield TensorDifference(name, kind, (count, mine.numel()), largest)


def _tensors(reader: CheckpointReader, name: str) -> dict[str, Tensor]:
    """The whole tensors that a checkpoint has of a parameter; {} when it has none."""
    if name not in reader.manifest.parameters:
        return {}
    found, spec = {WEIGHT: reader.weight(name)}, reader.spec(name)
    if reader.manifest.optimizer:
        for key, value in reader.local_optimizer(name, spec, 0, 1).items():
            # Rows that pad a vocabulary depend on the layout.
            whole = unshard([value], spec) if tuple(value.shape) == spec.local_shape(1) else value
            found["master" if key == WEIGHT else key] = whole
    return found
