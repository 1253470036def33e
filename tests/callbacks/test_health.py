"""The streak of skipped updates, and what ends it."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.callbacks.replica_check import ReplicaCheck
from megatron.callbacks.skipped_steps import SkippedSteps
from megatron.errors import NumericsError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.callbacks.fakes import out, trainer_of
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

BAD = out(float("nan"), float("inf"), skipped=True)
EMPTY = out(0.0, None, skipped=True, tokens=0)


def test_a_streak_ends_the_run_with_code_4_and_says_what_was_last_good():
    trainer = trainer_of([SkippedSteps(3)], [out(2.25), BAD, out(1.5), BAD, BAD, BAD])
    with pytest.raises(NumericsError, match=r"\b3 updates .*iteration 6\b") as error:
        trainer.run()
    assert error.value.exit_code == 4 and trainer.step == 6
    assert "Last finite loss: 1.5000" in str(error.value) and "loss scale" not in str(error.value)


def test_the_message_names_the_loss_scale():
    scaled = out(2.0, float("inf"), skipped=True, loss_scale=1.0)
    with pytest.raises(NumericsError, match=r"\b2 updates .*loss scale 1, .*\bnone\b"):
        trainer_of([SkippedSteps(2)], [scaled, scaled]).run()


@pytest.mark.parametrize("limit", [0, -1])
def test_without_a_limit_a_streak_does_not_end_the_run(limit):
    trainer = trainer_of([SkippedSteps(limit)], [BAD] * 10)
    trainer.run()
    assert trainer.step == 10


def test_empty_batches_neither_make_nor_end_a_streak():
    trainer = trainer_of([SkippedSteps(2)], [EMPTY, EMPTY, BAD, EMPTY, BAD])
    with pytest.raises(NumericsError, match="the last at iteration 5"):
        trainer.run()


def test_a_streak_survives_a_restart():
    first, second = SkippedSteps(3), SkippedSteps(3)
    trainer_of([first], [BAD] * 2, train_iters=2).run()
    second.load_state_dict(first.state_dict())
    with pytest.raises(NumericsError, match="3 updates in a row"):
        trainer_of([second], [BAD]).run()


def check_replicas(rank, world, axis, name, interval):
    """The message of a check after one entry of one parameter changed on rank 1; '' when it found nothing."""
    sizes = {"pipe": 1, "data": 1, "model": 1, axis: world}
    state = ParallelState.build(Topology(sizes), rank, "cpu")
    trainer = trainer_of([ReplicaCheck(interval)], state=state, train_iters=2)
    if rank == 1:
        with torch.no_grad():
            trainer.engine.masters[name].view(-1)[0] += 1e-3
    try:
        trainer.run()
    except NumericsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("axis", "name", "interval", "found"),
    [
        ("data", "2.mlp.linear1.weight", 2, True),
        ("model", "3.input_layernorm.scale", 2, True),
        ("model", "2.mlp.linear1.weight", 2, False),  # each tensor-parallel rank has its own part
        ("data", "2.mlp.linear1.weight", 3, False),  # not due yet
        ("data", "2.mlp.linear1.weight", 0, False),
        ("data", "2.mlp.linear1.weight", -5, False),
    ],
)
def test_replicas_that_differ_are_named(axis, name, interval, found):
    for message in run_distributed(check_replicas, 2, axis, name, interval):
        if found:
            assert re.search(rf"{axis}-parallel .*iteration 2 in 1 parameters.* {re.escape(name)}:", message)
        else:
            assert message == ""
