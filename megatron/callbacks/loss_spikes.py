"""Steps whose loss lies far above those before: counted, reported, and gone back over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint.agreement import broadcast, together
from megatron.checkpoint.rewinds import Rewind, Rewinding, choose_rewind, from_rows, read_rewinds, to_rows
from megatron.data.batch import StepBatch
from megatron.errors import NumericsError
from megatron.log import get_logger
from megatron.training.callback import Callback, due
from megatron.training.outliers import VALUES, Window

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

SCORED = 10_000  # steps over which the share of spikes is counted


@CALLBACKS.register(
    "loss_spikes",
    phase="measure",
    idle={"on_spike": None},
    required_by=("on_spike",),
    loses="spikes of the loss are neither reported nor gone back over",
)
class LossSpikes(Callback):
    """Adds `spike/loss_score` and `spike/grad_norm_score` to each log: the share of the last 10,000 steps whose value
    is more than `sigma` standard deviations above the mean of the `window` steps before.

    The loss being so high for `steps` steps in a row is a spike: the run warns of it, or goes back to a checkpoint from
    before it and leaves out the samples of it and of the `before` steps before it; so does a later start that only
    warns. One rewind more than `most` ends the run (exit code 4). The window does not take in the steps of a spike
    until it is over.
    """

    def __init__(
        self, root: Path | None, *, do: str, window: int, sigma: float, steps: int, before: int, most: int
    ) -> None:
        self.root, self.goes_back = root, do == "rewind"
        self.steps, self.before, self.most = steps, before, most
        self.rewinds: list[Rewind] = []
        self._window = Window(window, sigma, len(VALUES))
        self._high: list[list[float]] = []  # the values of the steps in a row whose loss is high
        self._flagged: list[list[int]] = [[] for _ in VALUES]  # the steps, by value
        self._seen = 0

    @classmethod
    def build(cls, context: RunContext) -> LossSpikes:
        save, options = context.args.checkpoint.save, context.args.training.on_spike
        assert isinstance(options, dict), "rules_health"
        return cls(Path(save) if save else None, **options)

    def start(self, trainer: Trainer) -> None:
        with together("reading the rewinds of this run", trainer.state):
            found = read_rewinds(self.root) if self.root is not None and trainer.state.rank == 0 else []
        self.rewinds = broadcast(found, trainer.state)
        trainer.batches = self._without_skipped(trainer.batches)

    def _without_skipped(
        self, batches: Callable[[int, int], Iterator[StepBatch]]
    ) -> Callable[[int, int], Iterator[StepBatch]]:
        """The same batches, with nothing to train on in the steps that rewinds leave out."""

        def steps(consumed: int, step: int) -> Iterator[StepBatch]:
            for number, batch in enumerate(batches(consumed, step), step + 1):
                if any(one.skip <= number <= one.last for one in self.rewinds):
                    batch = batch.untrained()
                yield batch

        return steps

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self._seen and due(trainer.step, trainer.args.logging.log_interval):
            for name, flagged in zip(VALUES, self._flagged, strict=True):
                trainer.metrics[f"spike/{name}_score"] = len(flagged) / min(self._seen, SCORED)

    def settled(self, trainer: Trainer, step: Settled) -> None:
        if step.trained_tokens == 0 or step.grad_norm is None:
            return
        now = [step.loss, step.grad_norm]
        limits = self._window.limits().tolist()
        high = [not value <= limit for value, limit in zip(now, limits, strict=True)]
        self._seen += 1
        for flagged, is_high in zip(self._flagged, high, strict=True):
            flagged += [step.step] * is_high
            flagged[:] = [number for number in flagged if number > step.step - SCORED]
        self._high.append(now)
        if high[0] and len(self._high) < self.steps:
            return
        if high[0]:
            self._spike(trainer, step, limits[0])
        for values in self._high:
            self._window.add(torch.tensor(values, dtype=torch.float64))
        self._high.clear()

    def _spike(self, trainer: Trainer, step: Settled, limit: float) -> None:
        """Go back, if it can be; the same on every rank."""
        first = step.step - self.steps + 1
        report = f"the loss has been above {limit:.4f} since iteration {first}, {step.loss:.4f} at {step.step}"
        chosen: Rewind | None = None
        if self.goes_back and self.root is not None:
            with together("looking for a checkpoint to go back to", trainer.state):
                if trainer.state.rank == 0:
                    chosen = choose_rewind(self.root, first, step.step, self.before)
            chosen = broadcast(chosen, trainer.state)
        if chosen is None:
            logger.warning(report + ("" if not self.goes_back else "; no checkpoint is old enough to go back to"))
            return
        if len(self.rewinds) >= self.most:
            raise NumericsError(
                f"{report}; the run has gone back {len(self.rewinds)} times already (on_spike.most). Resume with a "
                "lower learning rate: optimizer.params.lr=... override_lr_scheduler=true, or raise on_spike.most"
            )
        self.rewinds.append(chosen)
        logger.warning(
            f"{report}: back to the checkpoint of iteration {chosen.to}; the samples of the iterations {chosen.skip} "
            f"to {chosen.last} are left out (rewind {len(self.rewinds)} of at most {self.most})"
        )
        self._high.clear()
        raise Rewinding(self.rewinds)

    def state_dict(self) -> dict[str, Any]:
        return {
            "window": self._window.state(),
            "high": self._high,
            "flagged": self._flagged,
            "seen": self._seen,
            "rewinds": to_rows(self.rewinds),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load(state["window"])
        self._high = [list(values) for values in state["high"]]
        self._flagged, self._seen = [list(steps) for steps in state["flagged"]], state["seen"]
        known = from_rows(state.get("rewinds", ()))
        self.rewinds = known + [one for one in self.rewinds if one not in known]
