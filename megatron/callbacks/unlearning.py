"""Steps that forget (`ga_dataset`): counted, and left out while the forget loss is high enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.data.batch import StepBatch
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

DECAY = 0.1
"""What a new loss counts in the moving average, as in GPT-NeoX's fork."""


class ForgetLimit:
    """Whether steps forget: not while the loss on what is forgotten is above `limit`.

    Args:
        mode: `per_step`, `per_burst` or `ema`, see ga_threshold_check_mode.
        stay: with `ema`, once above the limit do not measure again.

    Attributes:
        average: moving average of the losses so far, None before the first.
        burst: the last burst of which the loss was compared, and whether its steps forget.
    """

    def __init__(self, limit: float, mode: str, stay: bool) -> None:
        self.limit, self.mode, self.stay = limit, mode, stay
        self.average: float | None = None
        self.burst: tuple[int, bool] | None = None

    def allows(self, burst: int, measure: Callable[[], float | None]) -> bool:
        """Whether the step that comes forgets.

        Args:
            burst: the first step of its burst.
            measure: the loss on its samples, which costs a forward pass; None where none of their tokens is trained:
                such a step is left out and decides nothing.
        """
        if self.mode == "ema":
            if self.average is None:
                if (loss := measure()) is None:
                    return False
                self.add(loss)
            allowed = self._is_low(self.average)
            if not allowed and not self.stay:
                self.add(measure())
            return allowed
        if self.mode == "per_burst" and self.burst is not None and self.burst[0] == burst:
            return self.burst[1]
        if (loss := measure()) is None:
            return False
        self.burst = (burst, self._is_low(loss))
        return self.burst[1]

    def _is_low(self, loss: float | None) -> bool:
        return loss is None or loss <= self.limit

    def add(self, loss: float | None) -> None:
        """One more loss in the moving average; one that is not finite is none."""
        if loss is not None and math.isfinite(loss):
            self.average = loss if self.average is None else self.average + DECAY * (loss - self.average)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"average": self.average, "burst": self.burst}

    def load(self, saved: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.average, burst = saved["average"], saved["burst"]
        self.burst = None if burst is None else (burst[0], burst[1])


@CALLBACKS.register(
    "unlearning",
    phase="measure",
    idle={"ga_dataset": None},
    keys=("ga_loss_threshold", "ga_threshold_check_mode", "ga_threshold_skip_forward"),
    required_by=("ga_loss_threshold",),
    loses="steps that forget are not counted",
)
class Unlearning(Callback):
    """Adds to each log, under the names of GPT-NeoX's fork, how many steps forgot: `train/ga_iterations` (since the
    last) and `train/ga_iterations_total`, or `gd_` with gd_mode; and `train/batch_type` of the last step: 0 ordinary,
    1 ascent, 2 gradient difference. Their losses are metrics of the objective.

    With ga_loss_threshold a step whose loss is above it has nothing to train on: it counts as a step, and its samples
    as read. `train/ga_steps_performed_total`, `ga_steps_skipped_total`, `ga_skip_rate` and `ga_loss_ema` tell of that.
    """

    def __init__(self, limit: ForgetLimit | None, name: str, loss: str) -> None:
        self.limit, self.name, self.loss = limit, name, loss
        self.performed = self.skipped = self._since = 0
        self._left_out = False
        self._pending: Tensor | None = None  # a loss that the device still works out

    @classmethod
    def build(cls, context: RunContext) -> Unlearning:
        keys, limit = context.args.post, None
        if keys.ga_loss_threshold is not None:
            limit = ForgetLimit(keys.ga_loss_threshold, keys.ga_threshold_check_mode, keys.ga_threshold_skip_forward)
        name = "gd" if keys.gd_mode else "ga"
        return cls(limit, name, "gd_forget_loss" if keys.gd_mode else "ga_actual_loss")

    def start(self, trainer: Trainer) -> None:
        if self.limit is not None:
            trainer.batches = self._within_limit(trainer, trainer.batches, self.limit)

    def _within_limit(
        self, trainer: Trainer, batches: Callable[[int, int], Iterator[StepBatch]], limit: ForgetLimit
    ) -> Callable[[int, int], Iterator[StepBatch]]:
        """The same batches, with nothing to train on in steps that the limit does not allow."""

        def measure(batch: StepBatch) -> float | None:
            found = trainer.engine.eval_batch(batch)
            place = 1 + trainer.engine.objective.metrics.index(self.loss)
            return float(found.sums[place]) / found.counts[place] if found.counts[place] else None

        def steps(consumed: int, step: int) -> Iterator[StepBatch]:
            for batch in batches(consumed, step):
                forget = trainer.plan.forget
                if forget is not None and _forgets(trainer, batch.step):
                    self._settle(limit)
                    self._left_out = not limit.allows(forget.burst_of(batch.step), partial(measure, batch))
                    if self._left_out:
                        batch = batch.untrained()
                yield batch

        return steps

    def _settle(self, limit: ForgetLimit) -> None:
        if self._pending is not None:
            limit.add(float(self._pending))
            self._pending = None

    def loaded(self, trainer: Trainer) -> None:
        self._since, self._left_out, self._pending = 0, False, None

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        forgets = _forgets(trainer, trainer.step - 1)
        if forgets and self._left_out:
            self.skipped += 1
        elif forgets:
            self.performed, self._since = self.performed + 1, self._since + 1
            if self.limit is not None:
                self._pending = out.metrics.get(self.loss)
        if due(trainer.step, trainer.args.logging.log_interval):
            trainer.metrics.update({f"train/{name}": value for name, value in self._counts(forgets).items()})
            self._since = 0

    def _counts(self, forgets: bool) -> dict[str, float]:
        kind = {"ga": 1, "gd": 2}[self.name] if forgets else 0
        found: dict[str, float] = {
            "batch_type": kind,
            f"{self.name}_iterations": self._since,
            f"{self.name}_iterations_total": self.performed,
        }
        if self.limit is not None:
            found["ga_steps_performed_total"], found["ga_steps_skipped_total"] = self.performed, self.skipped
            found["ga_skip_rate"] = self.skipped / max(1, self.performed + self.skipped)
            if self.limit.average is not None:
                found["ga_loss_ema"] = self.limit.average
        return found

    def state_dict(self) -> dict[str, Any]:
        if self.limit is not None:
            self._settle(self.limit)
        limit = self.limit.state() if self.limit is not None else None
        return {"performed": self.performed, "skipped": self.skipped, "limit": limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.performed, self.skipped = state["performed"], state["skipped"]
        if self.limit is not None and state["limit"] is not None:
            self.limit.load(state["limit"])


def _forgets(trainer: Trainer, step: int) -> bool:
    """Whether that step forgets and is none of `skip_steps`."""
    return trainer.plan.forgets(step) and not trainer.plan.skips(step)
