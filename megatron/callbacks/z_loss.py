"""The z-loss in the log: `train/z_loss`, the mean of z_loss_weight · logsumexp² over the trained tokens since the last.

It is not part of `train/lm_loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.model.head import OutputMatrix
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@CALLBACKS.register("z_loss", phase="measure", idle={"z_loss_weight": 0.0}, loses="train/z_loss is not logged")
class ZLossLog(Callback):
    """Logs the z-loss. Communicates at each log alone."""

    def __init__(self, interval: int, samples: int) -> None:
        """`samples` of a micro-batch over all data ranks."""
        self.interval, self.samples = interval, samples

    @classmethod
    def build(cls, context: RunContext) -> ZLossLog | None:
        args, dp_size = context.args, context.state.dp_size
        samples = (args.training.train_micro_batch_size_per_gpu or 1) * dp_size
        return cls(args.logging.log_interval, samples) if args.model.z_loss_weight else None

    def loaded(self, trainer: Trainer) -> None:
        heads = (layer for layer in trainer.engine.module.modules() if isinstance(layer, OutputMatrix))
        self.parts = [head.projection.z_loss for head in heads if head.projection.z_loss is not None]
        self._sum = torch.zeros((), device=trainer.state.device)
        self._steps = torch.zeros_like(self._sum)
        self._take(1)

    def _take(self, micro_batches: int) -> torch.Tensor:
        """What this rank's part of the step came to, as a share of the sum over data ranks."""
        found = torch.zeros_like(self._sum)
        for part in self.parts:
            found += part.total * (part.weight / micro_batches)
            part.total.zero_()
        return found

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        micro_batches = trainer.plan.batch_size(trainer.step - 1) // self.samples
        self._sum += self._take(micro_batches).masked_fill(out.skipped, 0.0)
        self._steps += ~out.skipped
        if not due(trainer.step, self.interval):
            return
        sums = self._sum / trainer.state.dp_size
        for group in (trainer.state.group("data"), trainer.state.group("pipe")):  # the last stage has it
            if group is not None:
                dist.all_reduce(sums, group=group)
        trainer.metrics["train/z_loss"] = sums / self._steps
        self._sum.zero_()
        self._steps.zero_()
