"""Metrics in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.errors import UserError
from megatron.home import installs

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from megatron.training.trainer import Trainer


@CALLBACKS.register("tensorboard", phase="report", idle={"tensorboard_dir": None})
class TensorBoard(Tracker):
    """Writes metrics for TensorBoard into `tensorboard_dir` (rank 0): a file per start, which it shows as one run.

    Of steps that are trained again after a restart it shows the new ones only.
    """

    _writer: SummaryWriter | None = None

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(f"tensorboard_dir is set: {installs('tensorboard')}") from error
        self._open_writer = partial(SummaryWriter, log_dir=directory)

    @classmethod
    def build(cls, context: RunContext) -> TensorBoard | None:
        return cls(context.args.logging.tensorboard_dir) if context.state.rank == 0 else None

    def loaded(self, trainer: Trainer) -> None:
        if trainer.step or self.newest > 0:
            self.close()  # of a run that goes back to a checkpoint
            self._writer = self._open_writer(purge_step=trainer.step + 1)

    def write(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._opened().add_scalar(name, value, step)

    def write_texts(self, texts: Sequence[tuple[str, str]], step: int) -> None:
        for number, (prompt, text) in enumerate(texts):
            # Markdown, in which an indented line is shown as it is.
            shown = "".join(f"    {line}\n" for line in f"{prompt}\u2502{text}".split("\n"))
            self._opened().add_text(f"samples/{number}", shown, step)

    def _opened(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = self._open_writer()
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
