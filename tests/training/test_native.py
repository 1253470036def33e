"""The native engine beside DeepSpeed's: the same curve, what it keeps per rank, and when it communicates.

Layouts are in test_invariance and test_expert_parallel, which run this engine too.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.mpu.sharding import ParamSpec, parameter, zeros
from megatron.plan.memory import estimate
from megatron.plan.stages import stage_sizes
from megatron.training.engine_update import clip_and_step
from megatron.training.native.buckets import cut_into_buckets
from megatron.training.native.engine import masters_of
from megatron.training.native.gradients import NativeGradients
from megatron.training.native.state import NativeState
from tests.distributed import run_distributed
from tests.faults.commands import ROOT, environment, make_folder
from tests.training.tiny import CAPPED, LLAMA, NEOX, VOCAB, Layout, build, step_batch, train

pytestmark = pytest.mark.cpu

STEPS = 6
MODELS = {"neox": NEOX, "llama": LLAMA, "capped": CAPPED}
SMALL_BUCKETS = 3000  # elements: the tiny models have about ten


def with_buckets(layout: Layout, elements: int | None) -> Any:
    given = layout.keys()
    if elements is not None:
        given["zero_optimization"] = {**given["zero_optimization"], "reduce_bucket_size": elements}
    return mock.patch.object(Layout, "keys", lambda self: given)


def train_in_buckets(
    rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int, elements: int
) -> dict[str, list[float]]:
    with with_buckets(layout, elements):
        return train(rank, world, keys, layout, steps)


def keys_of(model: str, precision: str) -> dict[str, Any]:
    return {**MODELS[model], "precision": precision, "fp32_allreduce": True}


@functools.cache
def by_deepspeed(model: str, precision: str, layout: Layout) -> dict[str, list[float]]:
    return run_distributed(train, layout.world, keys_of(model, precision), layout, STEPS)[0]


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(micro=8)),
        ("neox", Layout(micro=2)),
        ("llama", Layout(dp=2)),
        pytest.param("neox", Layout(dp=2, tp=2, micro=1), marks=pytest.mark.full),
        pytest.param("capped", Layout(dp=4, micro=1), marks=pytest.mark.full),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_curve_is_that_of_deepspeed(model: str, layout: Layout, precision: str) -> None:
    theirs = by_deepspeed(model, precision, layout)
    assert theirs["loss"][-1] < theirs["loss"][0] and max(theirs["grad_norm"]) > 0.25
    ours = dataclasses.replace(layout, engine="native")
    # The last bit of the norm, hence of the clip, depends on the order of a sum: a weight may round the other way.
    tolerance = 1e-6 if precision == "fp32" else 5e-6
    for curve in run_distributed(train_in_buckets, layout.world, keys_of(model, precision), ours, STEPS, SMALL_BUCKETS):
        for name in theirs:
            assert curve[name] == pytest.approx(theirs[name], rel=tolerance), name


def curve_and_shapes(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[list[float], set[int]]:
    """(Losses of three steps, numbers of dimensions of what the optimizer updates)."""
    engine, args, _ = build(rank, keys, layout)
    losses = [float(engine.train_batch(step_batch(step, args, engine.state), 0.01).loss) for step in range(3)]
    updated = [p for group in engine._optimizer_state._inner.param_groups for p in group["params"]]
    return losses, {p.ndim for p in updated}


def test_an_optimizer_that_looks_at_shapes_sees_parts_alone_or_whole_parameters_alone() -> None:
    """In one bucket some matrices lie in one rank's part and some in two: each must be updated by the same rule."""
    keys = {**NEOX, "optimizer": {"type": "SM3", "params": {"lr": 1e-2}}}
    theirs, _ = run_distributed(curve_and_shapes, 2, keys, Layout(dp=2, zero=1))[0]
    for ours, shapes in run_distributed(curve_and_shapes, 2, keys, Layout(dp=2, engine="native")):
        assert ours == pytest.approx(theirs, rel=1e-6) and shapes == {1}
    assert run_distributed(curve_and_shapes, 1, keys, Layout(engine="native"))[0][1] == {1, 2}


def sizes_of_state(rank: int, world: int, count: int, dtype: torch.dtype) -> list[dict[str, int]]:
    """What the optimizer keeps of small vectors after a step in which only the first got a gradient."""
    state = build(rank, LLAMA, Layout(dp=world))[0].state
    params = [parameter(ParamSpec(shape=(8,), init=zeros, kind="vector"), state) for _ in range(count)]
    buckets = cut_into_buckets(params, state, dtype)
    optimizer = torch.optim.AdamW(masters_of([{"params": params}], buckets))
    gradients = NativeGradients(buckets, optimizer, passes=1)
    params[0].float().sum().backward()
    gradients.end_pass()
    clip_and_step(gradients, state, max_norm=1.0)
    kept = NativeState(buckets, optimizer)
    return [{key: piece.numel() for key, piece in kept.read(p, range(8)).items()} for p in params]


def test_all_ranks_keep_the_same_tensors_of_a_parameter_without_a_gradient_and_of_one_that_they_own_nothing_of() -> (
    None
):
    """A checkpoint asks every rank for the same ones."""

    def expected(elements: int) -> dict[str, int]:
        return dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), elements)

    assert run_distributed(sizes_of_state, 1, 2, torch.float32) == [[expected(8), expected(8)]]
    assert run_distributed(sizes_of_state, 2, 1, torch.bfloat16) == [[expected(8)], [expected(0)]]


def live_bytes() -> int:
    """Of all memory that tensors of this process lie in."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def held(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[float, float, float]:
    """(Bytes per parameter that live in the second step, when all gradients are there; the same by the plan; this
    rank's parameters, the plan's being 1)."""
    before = live_bytes()
    engine, args, lr = build(rank, keys, layout)
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    found: list[int] = []
    engine.before_update = lambda: found.append(live_bytes() - before)
    engine.train_batch(step_batch(1, args, engine.state), lr(1))
    (place,) = stage_sizes(args, VOCAB)[1]
    padded = args.tokenizer.padded_vocab_size
    plan = estimate(args, held=place, stage=0, blocks=range(args.model.num_layers), padded_vocab_size=padded)
    parameters = sum(p.numel() for p in engine.params().values())
    return found[0] / parameters, (plan.total - plan.activations) / parameters, parameters / place.parameters


OUTSIDE_BLOCKS = 2 * 68 * 128 / (2 * 68 * 128 + 2 * 11 * 128**2)  # share of embedding and output matrix


@pytest.mark.parametrize(
    ("precision", "layout", "expected"),
    [
        ("bfloat16", Layout(engine="native"), 2 + 4 + 12),
        ("bfloat16", Layout(dp=2, engine="native"), 2 + 4 + 12 / 2),
        ("bfloat16", Layout(tp=2, engine="native"), 2 + 4 + 12),
        ("fp32", Layout(engine="native"), 4 + 4 + 8),
        ("fp32", Layout(dp=2, engine="native"), 4 + 4 + 8 / 2),
        ("layout", Layout(dp=2, micro=1, engine="native"), 4 + 8 + (4 + 8) / 2),
        ("muon", Layout(dp=2, engine="native"), 2 + 4 + (4 + 4 + 4 * OUTSIDE_BLOCKS) / 2),
        ("adafactor", Layout(dp=2, engine="native"), 2 + 4 + 4 / 2),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_bytes_per_parameter_are_those_of_the_plan(precision: str, layout: Layout, expected: float) -> None:
    """Weights, sums of gradients, and this rank's part of masters and moments; nothing else is kept. "layout": fp32,
    with `deterministic`; "muon": bf16, one moment of matrices and two of the rest; "adafactor": none."""
    more = {
        "layout": {"precision": "fp32", "deterministic": "layout"},
        "muon": {"precision": "bfloat16", "optimizer": {"type": "Muon"}},
        "adafactor": {"precision": "bfloat16", "optimizer": {"type": "Adafactor"}},
    }
    keys = {**NEOX, "hidden_size": 128, **more.get(precision, {"precision": precision})}
    for counted, planned, parameters in run_distributed(held, layout.world, keys, layout):
        assert counted == pytest.approx(expected, rel=0.03)
        assert planned == pytest.approx(expected, rel=1e-3) and parameters == 1


WITHOUT_DEEPSPEED = """
import os, runpy, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise RuntimeError(f"{name} is imported")

sys.meta_path.insert(0, Forbidden())
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_does_not_import_deepspeed(tmp_path: Path) -> None:
    """From the command line to a checkpoint, in a process of its own."""
    make_folder(tmp_path)
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED, str(ROOT / "train.py"), "run.yml", "engine=native"]
    changes = ["precision=bfloat16", "save=ckpt", "eval_interval=1", "eval_iters=1", "split=80,20,0"]
    done = subprocess.run(
        command + changes, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ckpt/latest").read_text().strip() == "global_step2"
