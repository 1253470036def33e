"""Lengths of runs and schedules in steps, tokens, FLOPs and fractions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.schedule import resume_schedule
from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts, derive
from megatron.training.setup import build_schedule
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

TOKENS = 4 * 32  # of a step of SMALL


@pytest.mark.parametrize(
    ("given", "steps"),
    [("1e6", 7813), (128_000, 1000), ("128_001 tokens", 1001), ("0.0000128B", 100), (1.0, 1), ("12.8k tokens", 100)],
)
def test_tokens_of_a_run(given: Any, steps: int, tmp_path: Path) -> None:
    args = derived(tmp_path, train_iters=None, train_tokens=given)
    assert (args.training.train_iters, args.training.train_tokens) == (steps, None)
    assert (steps - 1) * TOKENS < float(str(given).split()[0].replace("B", "e9").replace("k", "e3")) <= steps * TOKENS
    assert args.schedule.lr_decay_iters == steps
    assert derive(args).training.train_iters == steps


def test_a_warm_up_longer_than_the_schedule(tmp_path: Path) -> None:
    """As when a run is tried with few steps: it takes all of it, and that is said."""
    args = derived(tmp_path, lr=1.0, warmup="40 steps", train_iters=10)
    for again in (args, derive(args)):
        assert again.schedule.warmup == 1.0
        assert [note for note in again.notes if "warmup 40 steps" in note and "lr_decay_iters 10" in note]
    assert derived(tmp_path, lr=1.0, warmup="10 steps", train_iters=10).notes == ()


def test_flops_of_a_run(tmp_path: Path) -> None:
    """6 per parameter in a matrix product and 12 s h per layer of attention, for each token."""
    first = derived(tmp_path, train_iters=None, train_flops="1e12")
    assert first.training.train_iters is None
    h, s, layers, vocab = 64, 32, 4, 100
    block = 4 * h * h + 8 * h * h + 13 * h  # QKV and output, feed-forward, biases and two norms
    each = 6 * (layers * block + 2 * h + vocab * h) + 12 * layers * s * h
    args = derive(first, Facts(vocab_size=vocab))
    assert args.training.train_iters == -(-(10**12) // (each * TOKENS))
    assert "1e+12 FLOPs" in args.source("train_iters")


def test_parts_of_a_schedule(tmp_path: Path) -> None:
    shape = {"lr_decay_style": "wsd_s", "lr_cooldown": "1280 tokens", "lr_cycles": [0.3, "7_680 tokens"]}
    args = derived(
        tmp_path, lr=1.0, min_lr_ratio=0.1, warmup="5 steps", lr_rewarmup="0.1", lr_decay_iters="12.8k tokens", **shape
    )
    again = derive(args)
    for found in (args, again):
        options = found.schedule
        assert (options.warmup, options.lr_decay_iters, options.min_lr) == (0.05, 100, 0.1)
        assert (options.lr_cooldown, options.lr_rewarmup) == ("10 steps", 0.1)
        assert options.lr_cycles == (0.3, "60 steps")
        rate = build_schedule(found)
        # Cycles end at 30, 60 and 100, and rise over 3, 3 and 4 steps.
        table = {0: 0.2, 5: 1, 20: 1, 25: 0.55, 30: 0.4, 32: 0.7, 33: 1, 50: 1, 55: 0.55, 62: 0.55, 64: 1, 95: 0.55}
        assert {n: rate(n) for n in table} == pytest.approx(table)


def test_tokens_under_a_growing_batch(tmp_path: Path) -> None:
    """10 steps of 4 samples, then 8: 1,280 tokens, then 256 per step."""
    ramp = {"train_batch_size": 8, "batch_size_schedule": [[0, 4], [10, 8]], "lr_decay_style": "wsd"}
    lengths = {"train_tokens": 3840, "warmup": "1280 tokens", "lr_cooldown": "1280 tokens"}
    args = derived(tmp_path, train_iters=None, **ramp, **lengths)
    assert (args.training.train_iters, args.schedule.warmup, args.schedule.lr_cooldown) == (20, 0.5, "5 steps")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_tokens": 1e6}, "train_tokens: train_iters is set too"),
        ({"train_iters": None, "train_tokens": 1e6, "train_flops": 1.0}, "train_flops: train_tokens is set too"),
        ({"train_iters": None, "train_tokens": "many"}, "train_tokens: .*'many'"),
        ({"train_iters": None, "train_tokens": "5 steps"}, "train_tokens: .*'5 steps'"),
        ({"train_iters": None, "train_flops": 0.0}, "train_flops: must be above 0"),
        ({"warmup": "5 dogs"}, "warmup: .*'5 dogs'"),
        ({"warmup": "0.5 steps"}, "warmup: .*0.5 steps"),
        ({"lr_decay_iters": "1.5"}, "lr_decay_iters: .*1.5"),
        ({"min_lr_ratio": 0.1, "min_lr": 1e-5}, "min_lr_ratio: min_lr is set too"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio: .*not 2"),
        ({"lr_cooldown": 0.2}, "lr_cooldown: lr_decay_style: linear does not read it"),
        ({"lr_decay_style": "wsd", "lr_cycles": 2}, "lr_cycles: lr_decay_style: wsd does not read it"),
        ({"lr_decay_style": "wsd", "lr_cooldown": 20}, "lr_cooldown: .*not 20: for 20 steps write 20 steps"),
        ({"lr_decay_style": "wsd", "lr_cooldown_style": "inverse"}, "lr_cooldown_style: inverse needs a min_lr"),
        ({"lr_decay_style": "wsd_s", "lr_cycles": 0}, "lr_cycles: must be 1 or more, is 0"),
        ({"lr_decay_style": "wsd_s", "lr_cycles": [0.5, "20 steps"]}, "lr_cycles: .*0.5, 20 steps"),
        ({"ema_decay": 1.0}, r"ema_decay: must be in \(0, 1\), is 1"),
        ({"z_loss_weight": -1.0}, "z_loss_weight: must be 0 or more, is -1"),
        ({"lr_decay_style": "power", "lr_decay_power": 0.0}, "lr_decay_power: must be above 0"),
    ],
)
def test_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        derived(tmp_path, **changes)


def test_another_shape_is_another_schedule_on_resume(tmp_path: Path) -> None:
    wsd = {"lr_decay_style": "wsd_s", "lr_cycles": [0.5]}
    saved = derived(tmp_path, **wsd).to_dict()
    assert "lr_cycles" in resume_schedule(saved, saved, override=False, use_checkpoint=False)
    changed = derived(tmp_path, **wsd, lr_cooldown="20 steps").to_dict()
    with pytest.raises(UserError, match=r"lr_cooldown: 0\.1 in the checkpoint, now '20 steps'"):
        resume_schedule(saved, changed, override=False, use_checkpoint=False)
    older = {key: value for key, value in saved.items() if key != "lr_cooldown"}
    assert resume_schedule(older, changed, override=False, use_checkpoint=False)["lr_cooldown"] == "20 steps"
    kept = resume_schedule(saved, changed, override=False, use_checkpoint=True)
    args = derived(tmp_path, **wsd, lr_cooldown="20 steps").replace("the checkpoint", **kept)
    assert (args.schedule.lr_cooldown, args.schedule.lr_cycles) == (0.1, (0.5,))
