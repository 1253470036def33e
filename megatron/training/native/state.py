"""The training state by parameter in the native engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.training.engine_state import WEIGHT, OptimizerState, even_cut
from megatron.training.native.buckets import Bucket


class NativeState(OptimizerState):
    """See `OptimizerState`: of what is trained each rank has the part that it owns, the rest is replicated."""

    def __init__(self, buckets: Sequence[Bucket], optimizer: torch.optim.Optimizer) -> None:
        self.buckets = buckets
        self.optimizer = optimizer
        self._slots = {id(slot.parameter): slot for bucket in buckets for slot in bucket.slots}

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self.optimizer

    def is_replicated(self, p: Parameter) -> bool:
        """Whether the optimizer keeps nothing of it."""
        return id(p) not in self._slots

    def share(self, p: Parameter, rank: int, ranks: int) -> range:
        """What this rank owns; an even part of what nobody does."""
        return even_cut(p.numel(), rank, ranks) if self.is_replicated(p) else self._slots[id(p)].owned

    def _pieces(self, p: Parameter, share: range) -> dict[str, Tensor]:
        if self.is_replicated(p):
            return {WEIGHT: p.detach().view(-1)[share.start : share.stop]}
        master = self._slots[id(p)].master
        state = self.optimizer.state.get(master, {})
        return {WEIGHT: master.view(-1), **{key: state.get(key, master[:0]).view(-1) for key in self.keys(p)}}

    def publish(self, replicated: Iterable[tuple[Parameter, dist.ProcessGroup]]) -> None:
        """See `OptimizerState`."""
        super().publish(replicated)
        for bucket in self.buckets:
            bucket.start_publishing()
