"""What one data-parallel rank trains on in one optimizer step.

Shapes: b micro-batch, s sequence, gas micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.data.collate import StepArrays


@dataclass(frozen=True)
class StepBatch:
    """One whole optimizer step of one data-parallel rank.

    Attributes:
        tokens: int64 `[gas, b, s]`, the inputs.
        targets: int64 `[gas, b, s]`, the token after each input (0 where labels say "not trained").
        mask: float32 `[gas, b, s]`, 1 where the target is trained.
        positions: int64 `[gas, b, s]`, restarting at each document under `intra_document_masking`.
        doc_ids: int64 `[gas, b, s]`, growing at each document of a row; None without `intra_document_masking`.
        step: number of the optimizer step, from 0.
        consumed: samples consumed by all ranks before this step.
        trained: how many targets of this rank are trained.
        padding: how many inputs of this rank are padding.
        bounds: int32 `[gas, n]`, where the documents of each micro-batch start, as `bounds.document_bounds` has them;
            None without `intra_document_masking`.
        longest: the length of the longest document of each micro-batch, with `bounds`.
        answers: int64 `[gas, b, s]`, the number of the answer that each target belongs to, -1 = none; None where the
            objective does not read them. Numbers run through a micro-batch, and answers 2i and 2i + 1 are a pair, where
            there are pairs.
        answered: how many answers each micro-batch has.
        extras: float32, by name: per target `[gas, b, s]`, or per answer `[gas, n]`, n the most answers of a
            micro-batch of this rank, with 0 where a micro-batch has less. With `answers` there is `answer_tokens`, how
            many tokens of each answer are trained; see `answers.TRAINED_PLACES` for another one.
        counts: what the objective counts in it, if that was worked out while the tensors were on the host.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    positions: Tensor
    doc_ids: Tensor | None
    step: int
    consumed: int
    trained: int
    padding: int = 0
    bounds: Tensor | None = None
    longest: tuple[int, ...] = ()
    answers: Tensor | None = None
    answered: Sequence[int] = ()
    extras: dict[str, Tensor] = field(default_factory=dict)
    counts: Sequence[float] | None = None

    @classmethod
    def from_arrays(cls, arrays: StepArrays, step: int, consumed: int) -> StepBatch:
        """Tensors sharing the memory of numpy arrays."""
        named = {one.name: getattr(arrays, one.name) for one in fields(arrays)}
        carried = named.pop("carried")
        named |= {"answers": carried.answers, "answered": carried.answered}
        tensors: dict[str, Any] = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in named.items()}
        extras = {name: torch.from_numpy(values) for name, values in carried.extras.items()}
        return cls(**tensors, extras=extras, step=step, consumed=consumed)

    def untrained(self) -> StepBatch:
        """The same with nothing to train on, which engines skip."""
        return replace(
            self,
            mask=torch.zeros_like(self.mask),
            trained=0,
            counts=None if self.counts is None else [0.0] * len(self.counts),
        )

    def pin_memory(self) -> StepBatch:
        """The same in page-locked memory, from which copies to a GPU need not wait."""
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        """The same on another device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def tensors(self) -> dict[str, Tensor]:
        """Those of the attributes that are, and the extras."""
        return {**self._attributes(), **self.extras}

    def _attributes(self) -> dict[str, Tensor]:
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def _map(self, change: Callable[[Tensor], Tensor]) -> StepBatch:
        changed: dict[str, Any] = {name: change(x) for name, x in self._attributes().items()}
        return replace(self, **changed, extras={name: change(x) for name, x in self.extras.items()})
