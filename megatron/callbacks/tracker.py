"""Where metrics go, other than the console: one interface, the same names everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


class Tracker(Callback):
    """Writes every logged and evaluated metric. A subclass writes, and closes once."""

    _open = True

    def write(self, metrics: dict[str, float], step: int) -> None:
        """Store the metrics of a step."""

    def write_late(self, metrics: dict[str, float], step: int) -> None:
        """Store the metrics of a step that later ones may have followed."""
        self.write(metrics, step)

    def holds(self, metrics: dict[str, float], step: int) -> bool:
        """Whether these metrics of a step are stored already, where that can be seen."""
        return False

    def close(self) -> None:
        """Release what was opened."""

    def logged(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        self.write(metrics, step)

    def evaluated(self, trainer: Trainer, split: str, metrics: dict[str, float]) -> None:
        self.write({f"{split}/{name}": value for name, value in metrics.items()}, trainer.step)

    def end(self, trainer: Trainer) -> None:
        self._close_once()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._close_once()

    def _close_once(self) -> None:
        if self._open:
            self._open = False
            self.close()
