"""Checkpoints written beside a real run: the files are those of a save at that step, and the run is the same.

The disk takes nothing before the loop has taken two more steps: what the threads write is a copy. At every layout the
state of a parameter lies elsewhere: whole, cut over ranks, in one flat tensor, in DeepSpeed's parts or the native ones.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.callbacks.checkpointer import WRITING, Checkpointer
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.save import Save
from megatron.checkpoint.stored_zip import CheckedFile
from tests.distributed import run_distributed
from tests.training.runs import Faults, Report, corpus, train
from tests.training.tiny import Layout

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

WRITE, BEGIN, AFTER = CheckedFile.write, Checkpointer._begin, Checkpointer.after_step


def beside(rank: int, world: int, keys: dict[str, Any], layout: Layout, at_once: str) -> tuple[Report, list[int]]:
    """A rank of a run of six steps that saves step 3 both ways; the steps in which the ranks knew of a save."""
    gate, writing = threading.Event(), []

    def write(file: CheckedFile, data: Any) -> int:
        if threading.current_thread().name.startswith("writing the checkpoint"):
            assert gate.wait(100)
        return WRITE(file, data)

    def begin(self: Checkpointer, trainer: Any, temporary: bool) -> Save:
        if trainer.step == 3:
            with mock.patch.object(self, "root", Path(at_once)):
                BEGIN(self, trainer, temporary).write(trainer.state)
        return BEGIN(self, trainer, temporary)

    def after_step(self: Checkpointer, trainer: Any, out: Any) -> None:
        if WRITING in trainer.voted:
            writing.append(trainer.step)
        if trainer.step == 5:
            gate.set()
        AFTER(self, trainer, out)

    with (
        mock.patch.object(CheckedFile, "write", write),
        mock.patch.object(Checkpointer, "_begin", begin),
        mock.patch.object(Checkpointer, "after_step", after_step),
    ):
        return train(rank, world, keys, layout, Faults()), writing


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=1, engine="native"),
        Layout(dp=2, zero=2),
        Layout(dp=2, tp=2, zero=3),
        Layout(pp=2, tp=2),
    ],
    ids=lambda layout: layout.name,
)
def test_the_files_are_those_of_a_save_at_once(tmp_path: Path, layout: Layout) -> None:
    save, at_once = tmp_path / "save", tmp_path / "at_once"
    keys = {"data_path": corpus(tmp_path / "data"), "save": str(save), "async_save": True, "checkpoint_factor": 3}
    if layout.engine == "native":
        keys["precision"] = "bfloat16"
    for report, writing in run_distributed(beside, layout.world, keys, layout, str(at_once), timeout=110):
        assert not report.error and report.steps == [1, 2, 3, 4, 5, 6] and {4, 5} <= set(writing)
    assert list_checkpoints(save).steps == (3, 6)
    names = sorted(str(path.relative_to(at_once)) for path in (at_once / "global_step3").rglob("*") if path.is_file())
    assert len(names) > 10
    for name in names:
        if not name.endswith("manifest.json"):
            assert (at_once / name).read_bytes() == (save / name).read_bytes(), name
