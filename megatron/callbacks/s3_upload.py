"""Copies checkpoints to an S3 bucket while training goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint.agreement import await_thread
from megatron.checkpoint.find import list_checkpoints
from megatron.errors import DeepyError
from megatron.hub.s3 import S3Folder
from megatron.log import get_logger
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)


@CALLBACKS.register(
    "s3_upload",
    phase="report",
    idle={"s3_path": None},
    keys=("s3_chunk_size",),
    loses="checkpoints are not copied to s3_path (those there are still read at the start)",
)
class S3Upload(Callback):
    """Sends each new checkpoint to `s3_path`, and at the start what is missing there of those in `save` (rank 0).

    A thread sends while training goes on; the next save and the end of the run wait for it. What cannot be sent is
    reported and tried again with the next checkpoint: it ends no run. Nothing in the bucket is deleted.

    Args:
        root: the `save` folder.
        stored: where it goes; None on the ranks that only wait.
    """

    def __init__(self, root: Path, stored: S3Folder | None) -> None:
        self.root, self.stored = root, stored
        self._thread: threading.Thread | None = None
        self._sent: set[int] = set()
        self._latest: int | None = None

    @classmethod
    def build(cls, context: RunContext) -> S3Upload:
        options = context.args.checkpoint
        return cls(Path(options.save or ""), S3Folder.of(options) if context.state.rank == 0 else None)

    def loaded(self, trainer: Trainer) -> None:
        self._wait(trainer)  # a run that went back may still send
        self._start()

    def saved(self, trainer: Trainer, path: str) -> None:
        self._wait(trainer)  # so that no folder is deleted while it is read: old ones are after this hook
        self._sent.discard(trainer.saved_step or 0)  # a run that went back has replaced it
        self._start()

    def end(self, trainer: Trainer) -> None:
        self._wait(trainer)
        self._start()  # tries again what failed, and sends `latest`
        self._wait(trainer)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        if self.stored is not None and self._thread is not None and self._thread.is_alive():
            logger.warning(
                f"the upload of checkpoints to {self.stored.address} is cut short; the next start resumes it"
            )

    def _start(self) -> None:
        if self.stored is not None:
            self._thread = threading.Thread(target=self._send, args=(self.stored,), name="s3_upload", daemon=True)
            self._thread.start()

    def _wait(self, trainer: Trainer) -> None:
        """Until rank 0 has sent everything. Collective over all ranks."""
        for _ in await_thread(self._thread, trainer.state):
            trainer.progress.beat()

    def _send(self, stored: S3Folder) -> None:
        """Send every complete checkpoint that is not in the bucket yet, the newest first, then `latest`.

        Whatever goes wrong is reported: the next save tries again.
        """
        what = "a checkpoint"
        try:
            found = list_checkpoints(self.root)
            for step, checkpoint in reversed(found.checkpoints.items()):
                if checkpoint.manifest.temporary:  # nothing in the bucket is deleted
                    continue
                what = checkpoint.path.name
                if step not in self._sent:
                    self._send_one(stored, step, checkpoint.path)
                if step == found.latest != self._latest:
                    stored.write_latest(step)
                    self._latest = step
        except Exception as error:  # of whatever class: a thread has nobody above it
            told = str(error) if isinstance(error, (DeepyError, OSError)) else f"{type(error).__name__}: {error}"
            logger.warning(
                f"{what} was not sent to s3_path: {told}. It is complete in {self.root}; the next save sends it"
            )

    def _send_one(self, stored: S3Folder, step: int, path: Path) -> None:
        """Send a checkpoint, unless it is deleted meanwhile, as one that is not the newest may be."""
        started = time.monotonic()
        try:
            sent = stored.upload(path)
        except Exception:
            if path.exists():
                raise
            logger.info(f"{path.name} is not sent to s3_path: it was deleted here first (keep_last_n_checkpoints)")
            return
        if sent:
            logger.info(f"sent {path.name} to {stored.address}: {sent:,} bytes, {time.monotonic() - started:.1f} s")
        self._sent.add(step)
