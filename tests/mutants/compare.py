"""Every tensor of a run on several ranks beside that of one rank alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.layout import parameter_order
from megatron.errors import UserError
from megatron.mpu.sharding import ParamSpec, unshard
from tests.mutants.probe import Arrays, Trace
from tests.training.tiny import Layout, tiny_args


@dataclass(frozen=True)
class Tolerance:
    """The largest relative errors: of numbers, and of tensors in the L2 norm."""

    number: float = 2e-6
    weight: float = 1e-6
    gradient: float = 1e-4  # of a tensor whose gradient almost cancels out
    update: float = 1e-3


@dataclass(frozen=True)
class Difference:
    """A number or tensor that is not what one rank alone has."""

    when: str
    what: str
    rank: int
    error: float

    def __str__(self) -> str:
        return f"{self.when}: {self.what} on rank {self.rank} is wrong by {self.error:.2g} of itself"


class Comparison:
    """Of the traces of all ranks of a layout with that of one rank alone. `keys` are the model's."""

    def __init__(self, reference: Trace, ranks: Sequence[Trace], keys: dict[str, Any], layout: Layout) -> None:
        self.reference, self.ranks, self.layout = reference, ranks, layout
        self.allowed = Tolerance()
        padded = tiny_args(keys, layout).tokenizer.padded_vocab_size
        self.specs = {
            name: spec if spec.padded is None else replace(spec, padded=padded)
            for name, spec in reference.specs.items()
        }

    def differences(self) -> list[Difference]:
        """All of the first moment in which anything differs, in the order in which a step comes to them."""
        first = [trace.first for trace in self.ranks]
        found = list(self._tensors("before the first step", "weight", self.reference.first, first, self.allowed.weight))
        for step in range(len(self.ranks[0].steps)):
            found = found or list(self._step(step))
        return found or list(self._outputs())

    def _outputs(self) -> Iterator[Difference]:
        for name, ours in self.reference.outputs.items():
            theirs = {rank: trace.outputs[name] for rank, trace in enumerate(self.ranks) if name in trace.outputs}
            for rank, value in theirs.items():
                if not (error := _error(value, ours)) <= self.allowed.number:
                    yield Difference("in the end", name, rank, error)

    def _step(self, number: int) -> Iterator[Difference]:
        when = f"step {number}"
        ours, *theirs = (trace.steps[number] for trace in (self.reference, *self.ranks))
        yield from self._numbers(when, "number of trained tokens", ours.tokens, [step.tokens for step in theirs])
        yield from self._numbers(when, "votes", ours.votes, [step.votes for step in theirs])
        yield from self._numbers(when, "loss", ours.loss, [step.loss for step in theirs])
        gradients = [step.gradients for step in theirs]
        yield from self._tensors(when, "gradient", ours.gradients, gradients, self.allowed.gradient)
        yield from self._numbers(when, "gradient norm", ours.norm, [step.norm for step in theirs])
        ours, *theirs = (_update(trace, number) for trace in (self.reference, *self.ranks))
        yield from self._tensors(when, "update", ours, theirs, self.allowed.update)

    def _numbers(self, when: str, what: str, ours: float, theirs: Sequence[float]) -> Iterator[Difference]:
        for rank, value in enumerate(theirs):
            error = abs(value - ours) / abs(ours) if np.isfinite([value, ours]).any() else 0.0
            if not error <= self.allowed.number:
                yield Difference(when, what, rank, error)

    def _tensors(
        self, when: str, what: str, ours: Arrays, theirs: Sequence[Arrays], limit: float
    ) -> Iterator[Difference]:
        names = sorted({name for arrays in theirs for name in arrays} | set(ours), key=parameter_order)
        for name in names:
            held = False
            for first in range(0, self.layout.world, self.layout.tp):
                parts = [theirs[rank].get(name) for rank in range(first, first + self.layout.tp)]
                if all(part is None for part in parts):
                    continue  # another stage's
                held = True
                for rank, whole in enumerate(_joined(parts, self.specs[name]), first):
                    error = (
                        _error(whole, _joined([ours[name]], self.reference.specs[name])[0]) if name in ours else np.inf
                    )
                    if not error <= limit:
                        yield Difference(when, f"{what} of {name}", rank, error)
            if not held:
                yield Difference(when, f"{what} of {name}", 0, np.inf)


def _update(trace: Trace, number: int) -> Arrays:
    """What a step added to each weight."""
    before = trace.steps[number - 1].weights if number else trace.first
    return {name: value - before[name] for name, value in trace.steps[number].weights.items()}


def _joined(parts: Sequence[np.ndarray | None], spec: ParamSpec) -> list[np.ndarray | None]:
    """The whole tensor from the parts of all tensor-parallel ranks: once where it is split, else that of each
    rank. None for what has another shape, or padding that is not zero."""
    if spec.split_dim is None or any(part is None for part in parts):
        return list(parts)
    try:
        whole = unshard([torch.from_numpy(part) for part in parts], spec).numpy()
    except UserError:
        return [None]
    padding = spec.padded is not None and np.concatenate(parts, spec.split_dim)[spec.shape[spec.split_dim] :]
    return [None if np.any(padding) else whole]


def _error(theirs: np.ndarray | None, ours: np.ndarray | None) -> float:
    """In the L2 norm; relative to `ours`, or to nothing where it is zero."""
    if theirs is None or ours is None or theirs.shape != ours.shape:
        return np.inf
    size, error = np.linalg.norm(ours), np.linalg.norm(theirs.astype(np.float64) - ours)
    return float(error / size) if size else float(error)
