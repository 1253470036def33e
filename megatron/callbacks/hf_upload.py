"""Hugging Face exports to the Hub while a run trains."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.callbacks.hf_export import exports_of
from megatron.checkpoint.agreement import await_thread
from megatron.cluster.exports import last_words
from megatron.cluster.uploads import Upload, Uploads
from megatron.log import get_logger
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

LOOK_SECONDS = 10.0  # between looks for exports: their folder may be on a slow file system


@CALLBACKS.register(
    "hf_upload",
    phase="report",
    idle={"hf_upload_repo": None},
    loses="no export is sent to the Hub (hf_upload_repo)",
)
class HfUpload(Callback):
    """Sends the exports of `hf_export` to the Hub, and the last one of a finished run as `main`, too.

    A process beside the run does (rank 0 starts it), one at a time, those of earlier starts too: no step waits. One
    that fails is a warning and ends no run: it is tried again after the next export, at the end, and by the next start.
    A finished run waits for it.

    Args:
        uploads: on rank 0; None on the ranks that only wait at the end.
    """

    def __init__(self, uploads: Uploads | None) -> None:
        self.uploads = uploads
        self._looked = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._sending: Upload | None = None
        self._failed: list[Upload] = []  # what was pending when the last one was begun: still so when it has failed

    @classmethod
    def build(cls, context: RunContext) -> HfUpload:
        repo = context.args.checkpoint.hf_upload_repo or ""
        return cls(Uploads(exports_of(context.args), repo) if context.state.rank == 0 else None)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if self.uploads is None or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._process is None or self._process.poll() is not None:
            self._close(self.uploads)
            pending = self.uploads.pending(trainer.step)
            if pending != self._failed:  # else none is new since one failed
                self._begin(self.uploads, pending)

    def end(self, trainer: Trainer) -> None:
        """A finished run sends what is left, and says what the Hub has; one that stops goes at once."""
        if trainer.step < (trainer.args.training.train_iters or 0):
            self._kill()
            return
        thread = None
        if self.uploads is not None:
            given = (self.uploads, trainer.step)
            thread = threading.Thread(target=self._finish, args=given, name="hf_upload", daemon=True)
            thread.start()
        for _ in await_thread(thread, trainer.state):
            trainer.progress.beat()

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._kill()

    def _begin(self, uploads: Uploads, pending: list[Upload]) -> None:
        """Send the first of them, if there is one."""
        self._failed = pending
        if pending:
            try:
                self._process, self._sending = uploads.start(pending[0]), pending[0]
            except OSError as error:
                logger.warning(f"the export of iteration {pending[0].step} is not sent to {uploads.repo}: {error}")

    def _close(self, uploads: Uploads) -> None:
        """Report the process, which has ended, if there is one."""
        if self._process is None or self._sending is None:
            return
        code, one = self._process.returncode, self._sending
        self._process = self._sending = None
        if code == 0:
            with suppress(OSError):  # a full disk: the next start sends it again, which the Hub has by then
                uploads.note(one)
            logger.info(f"sent the export of iteration {one.step} to {uploads.repo}, branch {one.branch}")
        else:
            why = f"{last_words(uploads.log)} (exit code {code}, see {uploads.log})"
            logger.warning(f"the export of iteration {one.step} is not sent to {uploads.repo}: {why}")

    def _finish(self, uploads: Uploads, last: int) -> None:
        """Send one after the other until all have arrived or one fails."""
        self._failed = []
        while (process := self._process) is not None or self._failed != uploads.pending(last, is_last=True):
            if process is not None:
                process.wait()
                self._close(uploads)
            else:
                self._begin(uploads, uploads.pending(last, is_last=True))
        arrived, missing = uploads.arrived(), uploads.pending(last, is_last=True)
        logger.info(f"{uploads.repo} has {', '.join(arrived) or 'no export of this run'}")
        if missing:
            commands = "; ".join(shlex.join(["python", *uploads.command(one)]) for one in missing)
            logger.warning(f"{uploads.repo} lacks {', '.join(one.branch for one in missing)}; to send them: {commands}")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
