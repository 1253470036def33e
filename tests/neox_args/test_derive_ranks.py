"""Ranks and the batch triangle (known fault 64), stages (44), sequence parallel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from tests.neox_args.helpers import SMALL, derived

pytestmark = pytest.mark.cpu

TOTAL, MICRO, GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("changes", "ranks", "world", "data"),
    [
        ({}, None, 1, 1),
        ({"model_parallel_size": 2}, None, 2, 1),
        ({"model_parallel_size": 2, "pipe_parallel_size": 2}, None, 4, 1),
        ({"model_parallel_size": 2, "num_gpus": 8}, None, 8, 4),
        ({"pipe_parallel_size": 1, "num_gpus": 4, "num_nodes": 2}, None, 8, 8),
        ({"global_num_gpus": 6, "num_gpus": 3}, None, 6, 6),
        ({"model_parallel_size": 2, "num_gpus": 8}, 4, 4, 2),  # what runs wins over what one node has
    ],
)
def test_ranks(changes: dict, ranks: int | None, world: int, data: int, tmp_path: Path) -> None:
    args = derived(tmp_path, facts=Facts(num_devices=ranks), **changes)
    assert (args.parallel.world_size, args.parallel.data_parallel_size) == (world, data)


def test_ranks_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"6 ranks \(num_gpus\).*= 4; nearest 4 or 8"):
        derived(tmp_path, num_gpus=6, model_parallel_size=2, pipe_parallel_size=2)


def test_negative_stages(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.yml:\d+: pipe_parallel_size: .*\b0 .*is -1$"):
        derived(tmp_path, pipe_parallel_size=-1)


def test_stated_and_running_ranks_disagree(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.yml:\d+: global_num_gpus: is 96, but 4 ranks run"):
        derived(tmp_path, global_num_gpus=96, facts=Facts(num_devices=4))


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({TOTAL: 16, MICRO: 4}, (16, 4, 2)),
        ({MICRO: 4}, (8, 4, 1)),
        ({MICRO: 4, GAS: 3}, (24, 4, 3)),
        ({TOTAL: 16}, (16, 8, 1)),
        ({TOTAL: 16, GAS: 4}, (16, 2, 4)),
        ({TOTAL: 16, MICRO: 2, GAS: 4}, (16, 2, 4)),
    ],
)
def test_batch_triangle(keys: dict, want: tuple, tmp_path: Path) -> None:
    """4 ranks, tensor 2 -> data 2."""
    args = derived(tmp_path, num_gpus=4, model_parallel_size=2, **({MICRO: None} | keys))
    assert tuple(args.get(name) for name in (TOTAL, MICRO, GAS)) == want
    for name in (TOTAL, MICRO, GAS):
        assert args.source(name).startswith("derived") == (name not in keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({TOTAL: 12, MICRO: 4}, "train_batch_size: 12 .*micro 4 x dp 2 = 8; .*8 or 16"),
        ({TOTAL: 7}, "train_batch_size: 7 .*accumulation 1 x dp 2 = 2; .*6 or 8"),
        ({TOTAL: 1, MICRO: 4}, "nearest 8"),
        ({}, "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps"),
        ({GAS: 2}, "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps"),
        ({MICRO: 0}, "train_micro_batch_size_per_gpu: must be above 0, is 0"),
        (
            {TOTAL: 64, MICRO: 4, GAS: 2},
            r"\b64 .*micro 4 x accumulation 2 x dp 2 = 16; .*train_batch_size=16, gradient_accumulation_steps=8 .*"
            r"\b16 ranks \(dp 8\)",
        ),
    ],
)
def test_batch_mistakes(keys: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        derived(tmp_path, num_gpus=4, model_parallel_size=2, **({MICRO: None} | keys))
    assert re.search(message, str(error.value))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.sampled_from((TOTAL, MICRO, GAS)))
def test_any_two_give_the_third(micro: int, gas: int, ranks: int, missing: str) -> None:
    whole = {TOTAL: micro * gas * ranks, MICRO: micro, GAS: gas}
    values = SMALL | whole
    values.pop(missing)
    args = derive(NeoXArgs.from_saved(values), Facts(num_devices=ranks))
    assert {name: args.get(name) for name in whole} == whole


def test_describe_does_the_arithmetic(tmp_path: Path) -> None:
    args = derived(tmp_path, num_gpus=4, model_parallel_size=2, train_batch_size=16)
    lines = args.describe(vocab_size=100)
    assert lines[0] == "ranks: 4 = pipeline 1 x data 2 x tensor 2"
    assert lines[1] == "batch: 16 samples = micro 4 x accumulation 2 x data 2; x 32 = 512 tokens per step"
    assert lines[2] == "length: 100 steps = 1,600 samples = 51,200 tokens"
    assert lines[3].startswith("optimizer: adam, lr 0.001 to 0 linear over 100 steps, warm-up 1 steps")
    assert lines[4].startswith("parameters: ")


def test_more_stages_than_layers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pipe_parallel_size: 4 .*\b2 layers: .*at most 2\b"):
        derived(tmp_path, num_layers=2, pipe_parallel_size=4)


def test_sequence_parallel_needs_divisible_samples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seq_length 30 .*model_parallel_size 4; .*28 or 32"):
        derived(tmp_path, sequence_parallel=True, model_parallel_size=4, seq_length=30)
    assert derived(tmp_path, sequence_parallel=True, model_parallel_size=4).parallel.sequence_parallel


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("distributed_timeout", (-3, 0, 1e8, 1e300), (0.5, 9e7)),
        ("collective_timeout", (1e8, 1e300), (-1, 0, 9e7)),
        ("watchdog_seconds", (1e8, 1e300), (-1, 0, 9e7)),
    ],
)
def test_seconds_of_waiting_are_checked_with_the_rest(key: str, bad: tuple, good: tuple, tmp_path: Path) -> None:
    for value in bad:
        with pytest.raises(UserError, match=rf"a\.yml:[0-9]+: {key}: must be .*below 1e\+08"):
            derived(tmp_path, **{key: value})
    for value in good:
        assert derived(tmp_path, **{key: value}).get(key) == value
