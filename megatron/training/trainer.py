"""The training loop. Everything else is a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron.checkpoint.rewinds import Rewinding
from megatron.data.batch import StepBatch
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.training.callback import Callback
from megatron.training.engine import Engine
from megatron.training.progress import Progress
from megatron.training.rendezvous import lost_rank
from megatron.training.settled import Unsettled

logger = get_logger(__name__)


class Trainer:
    """Runs steps until `train_iters` or a stop request.

    Args:
        args: the derived configuration.
        state: this rank's place in the layout.
        batches: `batches(consumed, step)` yields this data rank's steps from that many consumed samples on, numbered
            from `step`; it ends early when it has requested a stop, on every rank.
        callbacks: in the order in which their hooks run.
        learning_rate: `learning_rate(step)` for the step that follows `step` completed ones.
        progress: that of a run that is already watched; its own by default.

    Attributes:
        plan: how many samples each step takes.
        engine: takes the steps; set once it is built, before the hook `start`.
        step: completed optimizer steps (NeoX's `iteration`).
        consumed: samples of the global batch sequence used so far.
        saved_step: the step of the newest complete checkpoint in `save`; None when there is none.
        progress: what the loop is doing, and how long things take.
        stop_reason: why the loop will end after this step; None to continue. See `request_stop`.
        stop_code: exit code that it then has: 0 when that is the plan, 3 when somebody asked for it.
        held_checkpoints: by the name of a callback, the steps whose checkpoints it still needs: they are not deleted.
        metrics: what callbacks add to the next log, by name: numbers, or 0-dim tensors that nobody changes afterwards.
            They are read once per log; on an accelerator one step later, so that no step waits for the device.
        voters: what ranks vote for in each step, by name: whether this one is for it, asked at the start of the step.
            Set in the hook `start`, the same names in the same order on every rank.
        ends: of those names, the ones for which a vote of any rank ends the run after that step.
        voted: of those names, what any rank of the job voted for in the step just done; the same on every rank.
        late: what the device works out is read one step later, when it has long been computed: on an accelerator.
    """

    engine: Engine

    def __init__(
        self,
        args: NeoXArgs,
        state: ParallelState,
        batches: Callable[[int, int], Iterator[StepBatch]],
        callbacks: Sequence[Callback],
        learning_rate: Callable[[int], float],
        progress: Progress | None = None,
    ) -> None:
        self.args = args
        self.state = state
        self.batches = batches
        self.plan = BatchPlan.of(args)
        self.callbacks = list(callbacks)
        self.learning_rate = learning_rate
        self.progress = progress or Progress()
        self.step = 0
        self.consumed = 0
        self.lr = 0.0
        self.stop_reason: str | None = None
        self.stop_code = 0
        self.saved_step: int | None = None
        self.held_checkpoints: dict[str, set[int]] = {}
        self.metrics: dict[str, float | Tensor] = {}
        self.voters: dict[str, Callable[[], bool]] = {}
        self.ends: set[str] = set()
        self.voted: set[str] = set()
        self.late = state.device.type != "cpu"
        self._unsettled: Unsettled | None = None
        self._failed = False

    def call(self, hook: str, *arguments: Any) -> None:
        """Run one hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    @contextmanager
    def tell_error(self) -> Iterator[None]:
        """Callbacks hear of an error that ends the run in here, once; that of a failed communication is a
        `LostRankError`."""
        try:
            yield
        except Rewinding:
            raise
        except BaseException as error:
            lost = lost_rank(error)
            if not self._failed:
                self._failed = True
                self._tell(lost or error)
            if lost is not None:
                raise lost from error
            raise

    def _tell(self, error: BaseException) -> None:
        """Every callback hears of it, also where another one fails at that."""
        for callback in self.callbacks:
            try:
                callback.error(self, error)
            except Exception:  # the error that ends the run is what counts
                logger.exception(f"{type(callback).__name__} failed while the run was ending by an error")

    def request_stop(self, reason: str, exit_code: int = 0) -> None:
        """End the loop after the current step. Must be asked on every rank in the same step."""
        if self.stop_reason is None:
            self.stop_reason, self.stop_code = reason, exit_code

    def stopping(self) -> bool:
        """Whether this rank has a reason to stop; its own, not agreed on."""
        return any(self.voters[name]() for name in self.ends)

    def settle(self) -> None:
        """Tell the callbacks what the last step came to, unless they know: waits for it.

        A callback that waits for the device asks for this first: the step's time ends here, and the next one's begins
        with it.
        """
        last, self._unsettled = self._unsettled, None
        if last is not None:
            outcome = last.settle()
            if self.late:
                self.progress.complete()
            self.call("settled", outcome)

    def abandon(self) -> None:
        """Forget the steps under way, and the stop that one of them asked for by plan: what they began from is about to
        be replaced. A stop that somebody else asked for stays (`stop_code`)."""
        self._unsettled = None
        if self.stop_code == 0:
            self.stop_reason = None
        self.metrics.clear()
        self.progress.abandon()

    def run(self) -> None:
        """Train from the current `step` to `train_iters`."""
        target = self.args.training.train_iters or 0
        self.engine.before_update = lambda: self.call("before_update")
        self.engine.votes = lambda: [vote() for vote in self.voters.values()]
        self.engine.beat = self.progress.beat
        self.progress.began = True
        with self.tell_error():
            self.call("loaded")
            batches = self.batches(self.consumed, self.step) if self.step < target else iter(())
            while self.step < target and self.stop_reason is None:
                self.progress.enter("reading data", self.step + 1)
                self.call("before_step")
                self.lr = self.learning_rate(self.step)
                batch = next(batches, None)
                if batch is None:
                    assert self.stop_reason is not None, "the training data ended before the run"
                    break
                self.progress.enter("training", self.step + 1)
                out = self.engine.train_batch(batch, self.lr)
                self.consumed += self.plan.batch_size(self.step)
                self.step += 1
                self.voted = {name for name, voted in zip(self.voters, out.votes, strict=True) if voted}
                self.settle()  # an accelerator: the step before, so that the host is at most one ahead
                self._unsettled = Unsettled(self.step, out)
                if not self.late:
                    self.progress.complete()
                self.progress.enter("callbacks", self.step)
                self.call("after_step", out)
                if not self.late:
                    self.settle()
            self.settle()
            self.call("end")

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
