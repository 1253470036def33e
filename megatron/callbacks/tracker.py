"""Where metrics go, other than the console: one interface, the same names everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


class Tracker(Callback):
    """Writes every logged and evaluated metric. A subclass writes, and closes once.

    Attributes:
        keeps_first: a step that is trained again, after a restart or going back to a checkpoint, is not written again:
            it would be shown twice, or refused.
        stored: such steps up to this one are there.
        newest: the last step that was written by this process.
    """

    keeps_first = False
    stored = newest = -1
    _open = True

    def loaded(self, trainer: Trainer) -> None:
        if self.keeps_first:
            self.stored = max(self.stored, self.newest)

    def _takes(self, step: int) -> bool:
        self.newest = max(self.newest, step)
        return step > self.stored

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Store the metrics of a step."""

    def write_late(self, metrics: dict[str, float], step: int) -> None:
        """Store the metrics of a step that later ones may have followed."""
        self.write(metrics, step)

    def write_texts(self, texts: Sequence[tuple[str, str]], step: int) -> None:
        """Store prompts with what the model made of them, where texts can be stored."""

    def holds(self, metrics: dict[str, float], step: int) -> bool:
        """Whether these metrics of a step are stored already, where that can be seen."""
        return False

    def close(self) -> None:
        """Release what was opened."""

    def logged(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        if self._takes(step):
            self.write(metrics, step)

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        if self._takes(trainer.step):
            self.write({f"{split}/{name}": value for name, value in metrics.items()}, trainer.step)

    def sampled(self, trainer: Trainer, texts: Sequence[tuple[str, str]]) -> None:
        if self._takes(trainer.step):
            self.write_texts(texts, trainer.step)

    def end(self, trainer: Trainer) -> None:
        self._close_once()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._close_once()

    def _close_once(self) -> None:
        if self._open:
            self._open = False
            self.close()
