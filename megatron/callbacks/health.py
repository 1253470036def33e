"""Watches the numbers: a streak of skipped steps ends the run, and replicas are compared now and then."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import NumericsError
from megatron.training.callback import Callback
from megatron.training.engine import StepOut
from megatron.training.trainer import Trainer


class SkippedSteps(Callback):
    """Ends the run with exit code 4 after `limit` skipped updates in a row (fp16 overflow, NaN gradients).

    The rule for a skipped step: its samples count as consumed and the schedule moves on (both are functions
    of the iteration), the weights and moments stay. The checkpointer writes nothing during a streak.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.streak = 0
        self.last_loss: Tensor | None = None

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if not out.skipped:
            self.streak, self.last_loss = 0, out.loss
            return
        if out.trained_tokens == 0:
            return  # nothing to train on is not a numerical fault
        self.streak += 1
        if self.limit > 0 and self.streak >= self.limit:
            last = "none yet" if self.last_loss is None else f"{float(self.last_loss):.4f}"
            scale = f" at loss scale {out.loss_scale:g}" if out.loss_scale is not None else ""
            raise NumericsError(
                f"{self.streak} updates in a row were skipped{scale}, the last at iteration {trainer.step}: the "
                f"gradient is not finite. Last finite loss: {last}. Restart from the last checkpoint with "
                "precision=bfloat16 or a lower learning rate, or skip the data that causes it."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"streak": self.streak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.streak = state["streak"]


class ReplicaCheck(Callback):
    """Every `interval` steps, compares what must be equal: replicated parameters over the tensor-parallel group, all
    but experts over the data-parallel group, experts over the ranks that hold the same ones. Catches silent corruption
    and lost reductions.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self.interval <= 0 or trainer.step % self.interval:
            return
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
        # A sum that is not a number on every rank is a fault of another kind, told by its loss.
        differ = (low != high) & ~(low.isnan() & high.isnan())
        if differ.any():
            names = [named[i][0] for i in torch.nonzero(differ).flatten().tolist()]
            raise NumericsError(
                f"{axis}-parallel replicas differ at iteration {trainer.step} in {len(names)} parameters, "
                f"first {names[0]}: a rank computes wrongly or lost a reduction. Restart from the last checkpoint "
                "without the node that differs."
            )
