"""The table of objectives, and what one looks like."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from megatron.model.head import LMOutput
from megatron.registry import Registry


class Objective(Protocol):
    """See the package's docstring."""

    batch_keys: tuple[str, ...]

    def loss(self, out: LMOutput, labels: Any) -> Tensor: ...


OBJECTIVES: Registry[Objective] = Registry("train_impl")
