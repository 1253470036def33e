"""Steps, samples and tokens into each other, against counting one step after the other."""

from __future__ import annotations

from fnmatch import fnmatch
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from megatron.data.order.phases import Progress
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan, batch_stages
from megatron.neox_arguments.derive import Facts, derive
from megatron.plan.shrink import shrink_overrides
from tests.neox_args.helpers import derived

STAGES = {
    "one size": ((0, 6),),
    "growing": ((0, 2), (3, 5), (4, 8)),
    "shrinking": ((0, 9), (1, 4), (7, 3)),
}


def sizes(stages: tuple[tuple[int, int], ...], steps: int) -> list[int]:
    return [next(batch for first, batch in reversed(stages) if first <= step) for step in range(steps)]


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_counts_are_those_of_counting(stages: tuple[tuple[int, int], ...]) -> None:
    plan, steps = BatchPlan(stages, tokens_per_sample=16), 20
    taken = sizes(stages, steps)
    before = list(accumulate(taken, initial=0))
    assert [plan.batch_size(k) for k in range(steps)] == taken
    assert [plan.samples(k) for k in range(steps)] == before[:-1]
    assert [plan.tokens(k) for k in range(steps)] == [16 * n for n in before[:-1]]
    for samples in range(before[-1]):
        assert plan.whole_steps(samples) == max(k for k in range(steps) if before[k] <= samples)
    for tokens in range(16 * before[-1]):
        assert plan.steps_for_tokens(tokens) == min(k for k in range(steps + 1) if 16 * before[k] >= tokens)


def test_phases_of_a_run_count_in_the_batches_of_its_steps() -> None:
    """10 steps took 90 samples in all, not those of the plan; the next ones are the plan's."""
    progress = Progress(8, 10, 90, (0, 0), BatchPlan(((0, 2), (12, 5), (14, 8))))
    assert [progress.samples_at(step) for step in (11, 12, 13, 14, 15)] == [92, 94, 99, 104, 112]
    assert [progress.step_at(samples) for samples in (92, 93, 98, 99, 111, 112)] == [11, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("ramp", [(2, 2, 100), (4, 3, 77), (1, 1, 5000), (8, 8, 9), (2, 14, 0), (16, 2, 50)], ids=str)
def test_a_ramp_grows_as_in_megatron(ramp: tuple[int, int, int]) -> None:
    """Megatron-LM's core/num_microbatches_calculator.py, step by step."""
    first, increment, samples = ramp
    last = 16
    while (last - first) % increment:
        last += 1
    plan = BatchPlan(batch_stages(last, None, ramp))
    consumed, increments = 0, (last - first) // increment
    for step in range(1200):
        done = increments
        if consumed <= samples and increments and samples:
            done = int(Fraction(consumed) / Fraction(samples, increments))
        assert plan.batch_size(step) == first + done * increment and plan.samples(step) == consumed
        consumed += plan.batch_size(step)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_size_schedule": [[0, 6], [10, 16]]}, "batch_size_schedule: 6 (from step 0)* 8*nearest 8"),
        ({"batch_size_schedule": [[0, 8], [10, 20]]}, "batch_size_schedule: 20 is* 8*nearest 16 or 24"),
        ({"batch_size_schedule": [[5, 8]]}, "batch_size_schedule: *[5]"),
        ({"batch_size_schedule": [[0, 8], [7, 16], [7, 8]]}, "batch_size_schedule: *[0, 7, 7]"),
        ({"batch_size_schedule": [[0, 0], [7, 16]]}, "batch_size_schedule: *above 0"),
        ({"batch_size_schedule": [[0, 8], ["7 epochs", 16]]}, "batch_size_schedule: *2B tokens*7 epochs"),
        ({"batch_size_schedule": [["1k tokens", 8], [7, 16]]}, "batch_size_schedule: *at 0, not 1k tokens"),
        ({"batch_size_schedule": [[0, 8], [3.5, 16]]}, "batch_size_schedule: *between 0 and 1, not 3.5"),
        (
            {"batch_size_schedule": [[0, 8], [0.5, 16]], "train_iters": None, "train_epochs": 1},
            "batch_size_schedule: 0.5 of the run needs train_iters or train_tokens",
        ),
        ({"batch_size_schedule": [[0, 8], [7, 16]], "train_batch_size": 32}, "batch_size_schedule: ends with 16*32"),
        ({"rampup_batch_size": [12, 8, 99], "train_batch_size": 32}, "rampup_batch_size: *12* 8*nearest 8 or 16"),
        ({"rampup_batch_size": [8, 4, 99], "train_batch_size": 32}, "rampup_batch_size: *increment, 4* 8*nearest 8"),
        ({"rampup_batch_size": [8, 16, 99], "train_batch_size": 32}, "rampup_batch_size: *16*8*32*16 or 32"),
        ({"rampup_batch_size": [64, 8, 99], "train_batch_size": 32}, "rampup_batch_size: *32*64"),
        ({"skip_steps": [[4, 4]]}, "skip_steps: *[4, 4]"),
        ({"seq_length_ramp": {"start": 5, "steps": 9}}, "seq_length_ramp.start: 5 *32*nearest 4 or 8"),
        ({"seq_length_ramp": {"start": 4, "steps": 9, "multiple": 8}}, "seq_length_ramp.start: 4 *32*8*nearest 8"),
        ({"seq_length_ramp": {"start": 4}}, "seq_length_ramp: *{start}"),
        ({"seq_length_ramp": {"start": 4, "steps": 9, "tokens": 9}}, "seq_length_ramp: *{start, steps, tokens}"),
        ({"seq_length_ramp": {"start": 0, "steps": 9}}, "seq_length_ramp.start: *0"),
    ],
    ids=str,
)
def test_what_cannot_be_reached_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        derived(tmp_path, **{**keys, "num_gpus": 2})
    assert fnmatch(str(raised.value), f"*a.yml:*{message}*".replace("[", "[[]")), raised.value


def test_the_length_of_a_run_counts_its_samples(tmp_path: Path) -> None:
    keys = {"batch_size_schedule": [[0, 8], [10, 16]], "num_gpus": 2}
    args = derived(tmp_path, **keys)
    assert args.training.train_batch_size == 16 and args.training.gradient_accumulation_steps == 2
    assert BatchPlan.of(args).tokens(100) == 32 * (10 * 8 + 90 * 16)
    counted = derived(tmp_path, **keys, train_iters=None, train_epochs=3, facts=Facts(epoch_samples=100, num_devices=2))
    assert counted.training.train_iters == 10 + (300 - 80) // 16


def test_stages_may_begin_at_tokens_and_fractions(tmp_path: Path) -> None:
    """Samples of 32 tokens: the first step before which so many tokens, or such a part of the run, are consumed."""
    stages = [[0, 8], ["2.5k tokens", 16], ["20 steps", 24], ["0.02M tokens", 32]]
    args = derived(tmp_path, batch_size_schedule=stages)
    assert args.training.batch_size_schedule == ((0, 8), (10, 16), (20, 24), (37, 32))
    plan = BatchPlan.of(args)
    assert plan.tokens(9) < 2500 <= plan.tokens(10) and plan.tokens(36) < 20_000 <= plan.tokens(37)
    assert derive(args, Facts(num_devices=1)).training == args.training
    half = {"batch_size_schedule": [[0, 8], [0.5, 16]]}
    assert derived(tmp_path, **half, train_iters=15).training.batch_size_schedule == ((0, 8), (8, 16))
    counted = derived(tmp_path, **half, train_iters=None, train_tokens="10k").training
    assert counted.batch_size_schedule == ((0, 8), (20, 16)) and counted.train_iters == 30


@pytest.mark.parametrize("ramp", [{"start": 4, "steps": 21}, {"start": 8, "tokens": 40_000}, {"start": 32, "steps": 5}])
def test_rows_grow_along_a_line(tmp_path: Path, ramp: dict[str, int]) -> None:
    """The longest of 4, 8, 16, 32 that is not above start + (seq_length - start) * done / whole ramp, from start on."""
    args = derived(tmp_path, batch_size_schedule=[[0, 4], [10, 64]], seq_length_ramp=ramp)
    plan, start = BatchPlan.of(args), ramp["start"]
    for step in range(60):
        done = Fraction(step, ramp["steps"]) if "steps" in ramp else Fraction(plan.tokens(step), ramp["tokens"])
        line = start + (32 - start) * min(done, 1)
        assert plan.seq_length(step) == max(n for n in (4, 8, 16, 32) if start <= n <= line)
    whole = derived(tmp_path, batch_size_schedule=[[0, 4], [10, 64]])
    assert [plan.tokens(k) for k in range(60)] == [BatchPlan.of(whole).tokens(k) for k in range(60)]


def test_multiples_leave_lengths_out(tmp_path: Path) -> None:
    args = derived(tmp_path, seq_length=96, seq_length_ramp={"start": 8, "steps": 88, "multiple": 8})
    assert BatchPlan.of(args).lengths == ((0, 8), (8, 16), (16, 24), (24, 32), (40, 48), (88, 96))


@pytest.mark.parametrize(
    "ramp", [{"batch_size_schedule": [[0, 4], [9, 16]]}, {"rampup_batch_size": [4, 4, 99]}], ids=str
)
def test_a_small_copy_of_a_run_has_no_ramps(tmp_path: Path, ramp: dict[str, Any]) -> None:
    keys = {"train_batch_size": 16, "seq_length_ramp": {"start": 8, "steps": 9}, **ramp}
    args = derived(tmp_path, **keys)
    small = derive(args.replace(**shrink_overrides(args)), Facts(num_devices=1))
    plan = BatchPlan.of(small)
    assert plan.stages == ((0, 1),) and not plan.lengths
