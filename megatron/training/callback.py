"""Callbacks: everything a run does other than its steps. The loop never gains an `if` for a feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer


def due(step: int, every: int | None) -> bool:
    """Whether what happens every `every` steps happens after `step` of them; `every` None or <= 0: never."""
    return every is not None and every > 0 and step % every == 0


class Callback:
    """Base class: every hook does nothing. Hooks run in the order in which callbacks were given, on every rank.

    A hook that communicates must do so on every rank. One that waits for the device calls `trainer.settle()` first, so
    that what it takes itself does not count as time in steps. Rank 0 saves `state_dict` with each checkpoint, under the
    class name. Numbers that a hook puts into `trainer.metrics` are part of the next log.
    """

    @classmethod
    def build(cls, context: Any, **settings: Any) -> Callback | None:
        """The callback of a run (`callbacks.RunContext`), with its settings; None when this rank has none."""
        return cls(**settings)

    def start(self, trainer: Trainer) -> None:
        """Everything is built, nothing is loaded yet."""

    def loaded(self, trainer: Trainer) -> None:
        """The start state is in place (from a checkpoint or fresh); `trainer.step` is final."""

    def before_step(self, trainer: Trainer) -> None:
        """Before the step that makes `trainer.step + 1`."""

    def before_update(self, trainer: Trainer) -> None:
        """Gradients are complete and not yet clipped: the only hook in which `engine.grads()` may be called."""

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        """`trainer.step` counts the step just done."""

    def settled(self, trainer: Trainer, step: Settled) -> None:
        """What a step came to is known on the host: after its own `after_step` hooks on a CPU, with the next step on an
        accelerator; always before the model is evaluated or saved and before the end. Every step once, in order."""

    def logged(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        """A set of metrics is ready (numbers, by their stable names)."""

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        """An evaluation of `split` ("validation", "test", ...) finished."""

    def sampled(self, trainer: Trainer, texts: Sequence[tuple[str, str]]) -> None:
        """The model continued prompts: (prompt, text) of each, on every rank."""

    def saved(self, trainer: Trainer, path: str) -> None:
        """A complete checkpoint was written to `path`."""

    def error(self, trainer: Trainer, error: BaseException) -> None:
        """The run ends by `error`, perhaps before `start`. Must not communicate: other ranks may be gone."""

    def end(self, trainer: Trainer) -> None:
        """The loop is over, whatever the reason, without an error."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart; JSON-like values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
