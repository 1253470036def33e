"""Metrics in TensorBoard."""

from __future__ import annotations

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.tracker import Tracker
from megatron.errors import UserError


@CALLBACKS.register("tensorboard", phase="report", idle={"tensorboard_dir": None})
class TensorBoard(Tracker):
    """Writes metrics for TensorBoard into `tensorboard_dir` (rank 0)."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "tensorboard_dir is set: pip install -r requirements/requirements-tensorboard.txt"
            ) from error
        self._writer = SummaryWriter(log_dir=directory)

    @classmethod
    def build(cls, context: RunContext) -> TensorBoard | None:
        return cls(context.args.logging.tensorboard_dir) if context.state.rank == 0 else None

    def write(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
