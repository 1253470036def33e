"""The training loop. Everything else is a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback
from megatron.training.engine import Engine
from megatron.training.progress import Progress
from megatron.training.rendezvous import lost_rank


class Trainer:
    """Runs steps until `train_iters` or a stop request.

    Args:
        args: the derived configuration.
        engine: takes the steps.
        batches: `batches(consumed)` yields this data rank's steps from that many consumed samples on.
        callbacks: in the order in which their hooks run.
        learning_rate: `learning_rate(step)` for the step that follows `step` completed ones.

    Attributes:
        step: completed optimizer steps (NeoX's `iteration`).
        consumed: samples of the global batch sequence used so far.
        saved_step: the step of the newest complete checkpoint in `save`; None when there is none.
        progress: what the loop is doing, and how long things take.
        stop_reason: why the loop will end after this step; None to continue. See `request_stop`.
        stop_code: exit code that it then has: 0 when that is the plan, 3 when somebody asked for it.
        save_blocked_by: why no checkpoint may be written now, set by a callback; None when one may.
        held_checkpoints: steps whose checkpoints a callback still needs: they are not deleted.
        metrics: what callbacks add to the next log, by name: numbers, or 0-dim tensors that nobody changes afterwards.
            They are read once per log; on an accelerator one step later, so that no step waits for the device.
    """

    def __init__(
        self,
        args: NeoXArgs,
        engine: Engine,
        batches: Callable[[int], Iterator[StepBatch]],
        callbacks: Sequence[Callback],
        learning_rate: Callable[[int], float],
    ) -> None:
        self.args = args
        self.engine = engine
        self.batches = batches
        self.callbacks = list(callbacks)
        self.learning_rate = learning_rate
        self.progress = Progress()
        self.step = 0
        self.consumed = 0
        self.lr = 0.0
        self.stop_reason: str | None = None
        self.stop_code = 0
        self.saved_step: int | None = None
        self.save_blocked_by: str | None = None
        self.held_checkpoints: set[int] = set()
        self.metrics: dict[str, float | Tensor] = {}

    @property
    def state(self) -> ParallelState:
        """This rank's place in the layout."""
        return self.engine.state

    def call(self, hook: str, *arguments: Any) -> None:
        """Run one hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        """End the loop after the current step. Must be asked on every rank in the same step."""
        if self.stop_reason is None:
            self.stop_reason, self.stop_code = reason, exit_code

    def run(self) -> None:
        """Train from the current `step` to `train_iters`."""
        target = self.args.training.train_iters or 0
        self.engine.before_update = lambda: self.call("before_update")
        self.engine.beat = self.progress.beat
        try:
            self.call("loaded")
            batches = self.batches(self.consumed) if self.step < target else iter(())
            while self.step < target and self.stop_reason is None:
                self.progress.enter("reading data", self.step + 1)
                self.call("before_step")
                self.lr = self.learning_rate(self.step)
                batch = next(batches)
                self.progress.enter("training", self.step + 1)
                out = self.engine.train_batch(batch, self.lr)
                self.step += 1
                self.consumed += self.args.training.train_batch_size
                self.progress.enter("callbacks", self.step)
                self.call("after_step", out)
            self.call("end")
        except BaseException as error:
            lost = lost_rank(error)
            self.call("error", lost or error)
            if lost is not None:
                raise lost from error
            raise

    def state_dict(self) -> dict[str, Any]:
        """The loop's own state and that of its callbacks."""
        states = {type(c).__name__: c.state_dict() for c in self.callbacks}
        return {"step": self.step, "consumed": self.consumed, "callbacks": {k: v for k, v in states.items() if v}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.step, self.consumed = state["step"], state["consumed"]
        for callback in self.callbacks:
            if (saved := state.get("callbacks", {}).get(type(callback).__name__)) is not None:
                callback.load_state_dict(saved)
