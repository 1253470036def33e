"""`check_start` and `gc_interval`: what they say and do, on every layout of weights that is stored otherwise."""

from __future__ import annotations

import gc
import logging
import math
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.callbacks.check_start import CheckStart
from megatron.callbacks.garbage_collection import GarbageCollection
from megatron.run import start
from megatron.training.callback import Callback
from tests.callbacks.fakes import GoesBack, out, run_and_go_back, trainer_of
from tests.distributed import run_distributed
from tests.training.models import BALANCED, MAMBA_AND_ATTENTION
from tests.training.runs import Faults, corpus, train
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu


def batch(tokens: list[int], targets: list[int], mask: list[float]) -> Any:
    made = {"tokens": torch.tensor([[tokens]]), "targets": torch.tensor([[targets]]), "mask": torch.tensor([[mask]])}
    return SimpleNamespace(**made, trained=sum(mask))


@pytest.mark.parametrize(
    ("one", "numbers"),
    [
        (batch([0, 3], [3, 4], [1, 1]), []),
        (batch([0, 5], [4, 4], [1, 1]), [("inputs", "0", "5", "4")]),
        (batch([0, 1], [4, -7], [1, 1]), [("targets", "-7", "4", "4")]),
        (batch([0, 1], [4, -100], [1, 0]), []),  # nobody trains on it
        (batch([0, 1], [9, 9], [0, 0]), []),
    ],
)
def test_ids_outside_the_vocabulary_are_reported_once(one: Any, numbers: list, caplog: Any) -> None:
    check = CheckStart(5, fresh=True)
    with caplog.at_level(logging.WARNING, "deepy"):
        assert list(check._watched(lambda consumed: iter([one, one, one]))(0)) == [one] * 3
    found = [re.search(r"the (\w+) .* from (-?\d+) to (-?\d+), .* to (\d+)", text) for text in caplog.messages]
    assert [line.groups() for line in found if line] == numbers and len(found) == len(numbers)


@pytest.mark.parametrize(("loss", "warned"), [(3.7, False), (3.0, False), (2.2, True), (5.2, True), (math.nan, True)])
def test_the_first_loss_is_compared_with_that_of_knowing_nothing(loss: float, warned: bool, caplog: Any) -> None:
    trainer = trainer_of([])
    for fresh in (True, False):
        check = CheckStart(37, fresh)  # ln 37 = 3.611
        check._first = 1
        caplog.clear()
        with caplog.at_level(logging.WARNING, "deepy"):
            for step in (1, 2):
                check.settled(trainer, SimpleNamespace(step=step, trained_tokens=8, loss=loss))
        assert len(caplog.messages) == (warned and fresh)
        assert all("3.611" in text and f"{loss:.4g}" in text for text in caplog.messages)


def test_a_run_that_goes_back_does_not_start(monkeypatch: Any, caplog: Any) -> None:
    """Its first step there has the loss of a model that has learnt something, and its first batch is no news."""
    looks: list[str] = []
    monkeypatch.setattr(CheckStart, "_look_at_weights", lambda self, params: looks.append("weights"))
    monkeypatch.setattr(CheckStart, "_look", lambda self, batch: looks.append("batch"))
    losses = [3.6, 1.0, 9.0, 1.0, 0.9]
    trainer = trainer_of([CheckStart(37, fresh=True), GoesBack(3)], [out(loss) for loss in losses], train_iters=3)
    with caplog.at_level(logging.WARNING, "deepy"):
        run_and_go_back(trainer, 1)
    assert looks == ["weights", "batch"] and caplog.messages == []


def started(rank: int, world: int, keys: dict[str, Any], layout: Layout, spoil: dict[str, float]) -> list[str]:
    """What a rank warns of when a run starts whose parameters are multiplied first, by the end of their name."""
    warned: list[str] = []
    begin = start.begin

    def spoiled(trainer: Any, where: Any) -> None:
        begin(trainer, where)
        with torch.no_grad():
            for name, parameter in trainer.engine.params().items():
                for end, factor in spoil.items():
                    if name.endswith(end):
                        getattr(parameter, "ds_tensor", parameter).mul_(factor)

    from megatron.callbacks import check_start
    from megatron.run import train as run_module

    with (
        mock.patch.object(run_module, "begin", spoiled),
        mock.patch.object(check_start.logger, "warning", warned.append),
    ):
        report = train(rank, world, {**keys, "train_iters": 1}, layout, Faults())
    assert not report.error and report.exit_code == 0
    return warned


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> str:
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("keys", [BALANCED, MAMBA_AND_ATTENTION, {"norm": "layernorm"}], ids=["moe", "mamba", "norm"])
def test_a_healthy_start_says_nothing(data: str, keys: dict[str, Any]) -> None:
    assert run_distributed(started, 1, {**keys, "data_path": data}, Layout(), {}, timeout=110) == [[]]


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2), Layout(dp=2, zero=3)], ids=lambda layout: layout.name)
def test_weights_that_are_zero_or_far_too_large_are_named(data: str, layout: Layout) -> None:
    spoil = {"2.attention.dense.weight": 0.0, "3.input_layernorm.scale": 0.0, "3.mlp.linear1.weight": 1e4}
    warned = run_distributed(started, layout.world, {"data_path": data}, layout, spoil, timeout=110)
    first = [text for rank in warned for text in rank]
    assert len(first) == layout.pp and sum(int(text.split()[0]) for text in first) == 3
    for name in spoil:
        assert sum(name in text for text in first) == 1


class Collections(Callback):
    """When Python collects, by the step that has begun; and whether it may by itself, there and in an evaluation."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.by_itself: list[tuple[str, bool]] = []

    def before_step(self, trainer: Any) -> None:
        self.by_itself.append(("step", gc.isenabled()))
        if trainer.step == 0:
            gc.callbacks.append(self._collected)
            self.trainer = trainer

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self.at.append(self.trainer.step)

    def after_step(self, trainer: Any, out: Any) -> None:
        if trainer.step == 3:
            with trainer.progress.during("evaluation"):
                self.by_itself.append(("evaluation", gc.isenabled()))
        if trainer.step == 7:
            raise RuntimeError("broken")


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_at_fixed_steps_and_by_itself_elsewhere(fails: bool) -> None:
    seen = Collections()
    trainer = trainer_of([GarbageCollection(2), seen], train_iters=8 if fails else 6)
    try:
        if fails:
            with pytest.raises(RuntimeError, match="broken"):
                trainer.run()
        else:
            trainer.run()
    finally:
        gc.callbacks.remove(seen._collected)
    assert seen.at == [2, 4, 6]
    assert set(seen.by_itself) == {("step", False), ("evaluation", True)}
    assert gc.isenabled() and gc.get_freeze_count() == 0 and trainer.progress.listeners == []


def test_what_is_unreachable_goes_at_that_step() -> None:
    class Knot:
        alive = 0

        def __init__(self) -> None:
            self.me = self
            Knot.alive += 1

        def __del__(self) -> None:
            Knot.alive -= 1

    counts = []

    class Makes(Callback):
        def before_step(self, trainer: Any) -> None:
            Knot()
            counts.append(Knot.alive)

    trainer_of([GarbageCollection(3), Makes()], train_iters=7).run()
    assert counts == [1, 2, 3, 1, 2, 3, 1]
