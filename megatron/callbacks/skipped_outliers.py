"""Reports steps that were skipped as outliers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.log import get_logger
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)


@CALLBACKS.register(
    "skipped_outliers",
    phase="measure",
    idle={"skip_outliers": None},
    loses="steps that are skipped as outliers are not reported",
)
class SkippedOutliers(Callback):
    """Adds `optim/step_skipped` to each log, the number of steps since the last one that `skip_outliers` skipped, and
    warns of each. They are among `train/skipped`, and do not count for `max_skipped_steps`."""

    def __init__(self, window: int, sigma: float) -> None:
        self.window, self.sigma = window, sigma

    @classmethod
    def build(cls, context: RunContext) -> SkippedOutliers:
        options = context.args.optimizer.skip_outliers
        assert isinstance(options, dict), "rules_health"
        return cls(**options)

    def loaded(self, trainer: Trainer) -> None:
        self._skipped = torch.zeros((), device=trainer.state.device)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if out.outlier is not None:
            self._skipped = self._skipped + out.outlier
        if due(trainer.step, trainer.args.logging.log_interval):
            trainer.metrics["optim/step_skipped"] = self._skipped
            self._skipped = torch.zeros_like(self._skipped)

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if step.outlier:
            logger.warning(
                f"iteration {step.step} is skipped (skip_outliers): its loss {step.loss:.4f} or gradient norm "
                f"{step.grad_norm:.4g} is more than {self.sigma:g} standard deviations above the mean of the last "
                f"{self.window} steps"
            )
