"""Which steps are profiled, and what is in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.callbacks.profiler import Profiler
from megatron.errors import UserError
from megatron.training.callback import Callback
from tests.callbacks.fakes import GoesBack, args_of, run_and_go_back, trainer_of

pytestmark = pytest.mark.cpu


class Works(Callback):
    """A matrix product in every step, in a range with the step's number."""

    def before_update(self, trainer: Any) -> None:
        with torch.profiler.record_function(f"step {trainer.step + 1}"):
            torch.ones(8, 8) @ torch.ones(8, 8)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The events of the one trace in a folder."""
    (path,) = folder.glob("rank0.*.pt.trace.json")
    return json.loads(path.read_text())["traceEvents"]


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return sorted({int(event["name"].split()[1]) for event in events if event["name"].startswith("step ")})


@pytest.mark.parametrize(
    ("steps", "begin", "expected"),
    [((2, 4), 0, [3, 4]), ((0, 2), 0, [1, 2]), ((3, 6), 4, [5, 6]), ((8, 30), 0, [9, 10])],
    ids=["inside", "first steps", "resumed inside", "beyond the end"],
)
def test_a_trace_holds_the_steps_asked_for(tmp_path: Path, steps: Any, begin: int, expected: list[int]) -> None:
    trainer = trainer_of([Profiler(steps, tmp_path, None, 0, False, False), Works()])
    trainer.step = begin
    trainer.run()
    events = recorded(tmp_path)
    assert numbers(events) == expected
    products = [event for event in events if event["name"] == "aten::mm"]
    assert len(products) == len(expected) and products[0]["args"]["Input Dims"][0] == [8, 8]


@pytest.mark.parametrize("to", [1, 5])
def test_a_run_that_goes_back_records_once_and_warns_of_nothing(tmp_path: Path, caplog: Any, to: int) -> None:
    callbacks = [Profiler((2, 4), tmp_path, None, 0, False, False), Works(), GoesBack(6)]
    with caplog.at_level("WARNING", "deepy"):
        run_and_go_back(trainer_of(callbacks), to)
    assert numbers(recorded(tmp_path)) == [3, 4] and caplog.messages == []


def test_an_error_leaves_the_trace_of_the_steps_before(tmp_path: Path) -> None:
    class Fails(Callback):
        def before_step(self, trainer: Any) -> None:
            if trainer.step == 3:
                raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        trainer_of([Profiler((1, 9), tmp_path, None, 0, False, True), Works(), Fails()]).run()
    assert numbers(recorded(tmp_path)) == [2, 3]


def test_a_run_without_the_chosen_steps_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of([Profiler((10, 12), tmp_path, None, 0, False, False)]).run()
    assert "steps 1 to 10" in caplog.text and not list(tmp_path.iterdir())


def test_memory_is_recorded_from_the_start_and_written_once(tmp_path: Path) -> None:
    """The calls to torch.cuda; the GPU tests read a real snapshot."""
    folder = tmp_path / "new"
    with mock.patch.object(torch.cuda, "memory") as memory:
        callback = Profiler((2, 4), None, folder, 3, True, True)
        memory._record_memory_history.assert_called_once_with(max_entries=100_000)
        trainer = trainer_of([callback])
        memory._dump_snapshot.side_effect = lambda path: (trainer.step, path)
        trainer.run()
    memory._dump_snapshot.assert_called_once_with(str(folder / "mem_snapshot_rank3.pickle"))
    assert memory._record_memory_history.call_args == mock.call(enabled=None) and folder.is_dir()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"profile": True}, r"profile: .*tensorboard_dir"),
        ({"memory_profiling": True}, r"memory_profiling: .*memory_profiling_path"),
        ({"profile": True, "save": "x", "profile_step_stop": 10}, r"profile_step_stop: .*10.*profile_step_start.*10"),
        ({"profile": True, "save": "x", "profile_step_start": -1}, r"profile_step_start: .*-1"),
    ],
)
def test_what_cannot_be_profiled_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        args_of(**keys)
