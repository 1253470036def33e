"""What one data-parallel rank trains on in one optimizer step.

Shapes: b micro-batch, s sequence, gas micro-batches of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

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
        padding: how many inputs of this rank are padding.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    positions: Tensor
    doc_ids: Tensor | None
    step: int
    consumed: int
    padding: int = 0

    @classmethod
    def of(cls, arrays: StepArrays, step: int, consumed: int) -> StepBatch:
        """Tensors sharing the memory of numpy arrays."""
        doc_ids = None if arrays.doc_ids is None else torch.from_numpy(arrays.doc_ids)
        return cls(
            tokens=torch.from_numpy(arrays.tokens),
            targets=torch.from_numpy(arrays.targets),
            mask=torch.from_numpy(arrays.mask),
            positions=torch.from_numpy(arrays.positions),
            doc_ids=doc_ids,
            step=step,
            consumed=consumed,
            padding=arrays.padding,
        )

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def pin_memory(self) -> StepBatch:
        """The same in page-locked memory, from which copies to a GPU need not wait."""
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self._tensors().items()}
        return replace(self, **pinned)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StepBatch:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking) for name, value in self._tensors().items()
        }
        return replace(self, **moved)
