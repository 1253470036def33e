"""Ends a run whose updates are skipped again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.errors import NumericsError
from megatron.log import get_logger
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)


@CALLBACKS.register(
    "skipped_steps",
    phase="measure",
    keys=("max_skipped_steps",),
    loses="skipped updates in a row do not end the run",
)
class SkippedSteps(Callback):
    """Ends the run with exit code 4 after `max_skipped_steps` skipped updates in a row (fp16 overflow, NaN gradients).

    The rule for a skipped step: its samples count as consumed and the schedule moves on (both are functions
    of the iteration), the weights and moments stay.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.streak = 0
        self.last_loss: float | None = None

    @classmethod
    def build(cls, context: RunContext) -> SkippedSteps:
        return cls(context.args.optimizer.max_skipped_steps)

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if not step.skipped:
            self.streak, self.last_loss = 0, step.loss
            return
        if step.trained_tokens == 0:
            return  # nothing to train on is not a numerical fault
        if step.outlier:
            return  # nor is what the weights were kept from
        self.streak += 1
        if self.limit > 0 and self.streak >= self.limit:
            last = "none yet" if self.last_loss is None else f"{self.last_loss:.4f}"
            scale = f" at loss scale {step.loss_scale:g}" if step.loss_scale is not None else ""
            other = "" if trainer.args.optimizer.precision == "bfloat16" else "precision=bfloat16, or with "
            raise NumericsError(
                f"{self.streak} updates in a row were skipped{scale}, the last at iteration {step.step}: the "
                f"gradient is not finite. Last finite loss: {last}. Resume from the last good checkpoint with {other}"
                "a lower learning rate: optimizer.params.lr=... override_lr_scheduler=true"
            )

    def saved(self, trainer: Trainer, path: str) -> None:
        if self.streak and trainer.saved_step == trainer.step:
            logger.info(f"{path}: the last {self.streak} updates were skipped, so its weights are those before them")

    def state_dict(self) -> dict[str, Any]:
        return {"streak": self.streak}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.streak = state["streak"]
