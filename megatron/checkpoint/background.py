"""A checkpoint that is written while training goes on: each rank has a thread that does what is left of `Save`.

The threads speak with one another over a group of their own: no collective operation of theirs can meet one of the
loop, and each rank has one save under way at most, so that all do the same in the same order.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.save import Save
from megatron.mpu.doing import Doing
from megatron.mpu.state import ParallelState


def aside(state: ParallelState, seconds: float) -> ParallelState:
    """The same place in the layout for what goes on beside the loop: another group of all ranks on the host, with a
    limit of so many seconds. Collective over all ranks."""
    host = None if state.host is None else dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return replace(state, host=host, doing=Doing())


class BackgroundSave:
    """Writes a save that was copied, from now on.

    Args:
        state: from `aside`.

    Attributes:
        step, temporary: of the checkpoint.
        seconds: that it took; until the end, so far.
        signs: of progress, counted.
    """

    def __init__(self, save: Save, state: ParallelState) -> None:
        self.step, self.temporary = save.folder.step, save.temporary
        self.signs = 0
        self._save, self._state = save, state
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._started, self._ended = time.monotonic(), 0.0
        self.thread = threading.Thread(
            target=self._write, name=f"writing the checkpoint of step {self.step}", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def beat(self) -> None:
        self.signs += 1

    @property
    def running(self) -> bool:
        return self.thread.is_alive()

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def result(self) -> Path:
        """The folder of the complete checkpoint, once the thread has ended. Raises what it failed with."""
        self.thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _write(self) -> None:
        try:
            self._path = self._save.write(self._state)
        except BaseException as error:  # of whatever class: it is raised in the loop
            self._error = error
        finally:
            self._ended = time.monotonic()
