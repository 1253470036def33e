"""Trains to the end of a run, going back to an earlier checkpoint where a callback asks for it (`Rewinding`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.callbacks.checkpointer import Checkpointer
from megatron.checkpoint import layout
from megatron.checkpoint.agreement import broadcast, together
from megatron.checkpoint.find import Checkpoint, abandon_after, open_checkpoint
from megatron.checkpoint.folder import write_latest
from megatron.checkpoint.rewinds import Rewind, Rewinding, write_rewinds
from megatron.checkpoint.start import Start
from megatron.run.start import restore
from megatron.training.trainer import Trainer


def train_with_rewinds(trainer: Trainer) -> None:
    """`trainer.run`, until it ends by itself."""
    while True:
        try:
            trainer.run()
            return
        except Rewinding as asked:
            rewinds = asked.rewinds
        with trainer.tell_error():
            _go_back(trainer, rewinds)


def _go_back(trainer: Trainer, rewinds: Sequence[Rewind]) -> None:
    """Load the checkpoint of the last one, which is what a start of this run finds from now on; later ones stay until
    they are replaced."""
    root, state, rewind = Path(trainer.args.checkpoint.save or ""), trainer.state, rewinds[-1]
    trainer.progress.enter("callbacks", trainer.step)  # the step that asked may have been in any phase
    trainer.held_checkpoints["rewind"] = {rewind.to}
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpointer):
            callback.drain(trainer)  # `latest` will name one that is still being written
    trainer.held_checkpoints.pop("rewind", None)
    trainer.abandon()
    checkpoint: Checkpoint | None = None
    with trainer.progress.during("loading"), together("going back to an earlier checkpoint", state):
        if state.rank == 0:
            checkpoint = open_checkpoint(root / layout.step_folder(rewind.to), "save")
            abandon_after(root, rewind.to)
            write_latest(root, rewind.to)
            write_rewinds(root, rewinds)  # last: a job killed before it resumes, and finds the spike again
    checkpoint = broadcast(checkpoint, state)
    restore(trainer, Start("resume", checkpoint, rewind.to, ""), checksums=True, whole=True)
