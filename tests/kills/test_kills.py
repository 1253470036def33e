"""Random kills at a covering handful of layouts; `python -m tests.kills` does it hundreds of times."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from megatron.checkpoint.find import list_checkpoints
from tests.kills.killing import STEPS, survive, undisturbed
from tests.training.runs import corpus
from tests.training.tiny import Layout

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("layout", "asynchronous", "seed"),
    [(Layout(dp=2, zero=1), False, 1), (Layout(pp=2), True, 2)],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(
    tmp_path: Path, layout: Layout, asynchronous: bool, seed: int
) -> None:
    keys = {"data_path": corpus(tmp_path / "data"), "async_save": asynchronous}
    straight = undisturbed(keys, layout, tmp_path / "straight")
    met = survive(keys, layout, tmp_path / "killed", straight, Random(seed), kills=3)
    assert met, "no kill met the run"
    left = list_checkpoints(tmp_path / "killed")
    assert (left.latest, left.incomplete) == (STEPS, {})
