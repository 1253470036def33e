"""Compares replicas now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.errors import NumericsError
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@CALLBACKS.register("replica_check", phase="check", idle={"replica_check_interval": 0})
class ReplicaCheck(Callback):
    """Every `replica_check_interval` steps, compares what must be equal: replicated parameters over the
    tensor-parallel group, all but experts over the data-parallel group, experts over the ranks that hold the same
    ones. Catches silent corruption and lost reductions.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    @classmethod
    def build(cls, context: RunContext) -> ReplicaCheck:
        return cls(context.args.training.replica_check_interval)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if not due(trainer.step, self.interval):
            return
        trainer.settle()
        shares_experts = trainer.state.ep_size > 1
        self._compare(trainer, "data", lambda p: not (shares_experts and p.spec.experts))
        if shares_experts:
            self._compare(trainer, "expert_data", lambda p: p.spec.experts)
        self._compare(trainer, "model", lambda p: p.spec.split_dim is None)

    @torch.no_grad()
    def _compare(self, trainer: Trainer, axis: str, wanted: Any) -> None:
        group = trainer.state.group(axis)
        if group is None:
            return
        named = [(n, p) for n, p in trainer.engine.params().items() if wanted(p) and p.numel()]
        if not named or hasattr(named[0][1], "ds_id"):
            return  # ZeRO-3 keeps no replicas
        sums = torch.stack([p.detach().sum(dtype=torch.float64) for _, p in named])
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        # A sum that is not a number on every rank is another fault, which the loss shows.
        differ = (low != high) & ~(low.isnan() & high.isnan())
        if differ.any():
            names = [named[i][0] for i in torch.nonzero(differ).flatten().tolist()]
            raise NumericsError(
                f"{axis}-parallel replicas differ at iteration {trainer.step} in {len(names)} parameters, "
                f"first {names[0]}: a rank computes wrongly or lost a reduction. Restart from the last checkpoint "
                "without the node that differs."
            )
