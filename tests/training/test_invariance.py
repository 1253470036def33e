"""Layout invariance, the contract: the same curve at any pp, dp, tp, micro-batch, ZeRO stage and sequence parallel.

The reference is one rank with one micro-batch; `test_reference.py` holds that against plain torch. Single tensors are
compared in tests/mutants.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from tests.distributed import run_distributed
from tests.training.models import MODELS
from tests.training.tiny import Layout, train

pytestmark = pytest.mark.cpu

STEPS = 20
NAMES = ("neox", "neox-tied", "llama", "llama-untied", "gemma3", "capped")
SMALL = [Layout(pp=pp, dp=dp, tp=tp) for pp in (1, 2, 4) for dp in (1, 2, 4) for tp in (1, 2, 4) if pp * dp * tp <= 4]
SMALL += [dataclasses.replace(layout, engine="native") for layout in SMALL if layout.pp == 1]
# Every layout with every second model, and the next layout with the others.
EACH = [(name, layout) for i, layout in enumerate(SMALL) for j, name in enumerate(NAMES) if (i + j) % 2 == 0]
COVERING = [
    ("neox", Layout(tp=2)),
    ("llama", Layout(tp=2, micro=1, sequence_parallel=True)),
    ("neox-tied", Layout(pp=2)),
    ("llama", Layout(pp=2, tp=2, micro=1, sequence_parallel=True)),
    ("neox", Layout(dp=2, tp=2, zero=1)),
    ("neox-tied", Layout(pp=2, dp=2, zero=1)),
    ("llama", Layout(dp=2, zero=2)),
    ("llama-untied", Layout(dp=4, micro=1, zero=3)),
    ("neox-tied", Layout(dp=2, tp=2, zero=3)),
    ("neox", Layout(micro=1)),
    ("neox", Layout(pp=2, micro=4)),
    ("gemma3", Layout(pp=2, tp=2, micro=1, sequence_parallel=True)),
    ("gemma3", Layout(dp=2, zero=3)),
    ("capped", Layout(pp=2, tp=2)),
    ("capped", Layout(dp=2, tp=2, zero=3)),
    ("neox-tied", Layout(dp=2, tp=2, engine="native")),
    ("llama", Layout(dp=4, micro=1, engine="native")),
    ("gemma3", Layout(dp=2, tp=2, sequence_parallel=True, engine="native")),
]


def shape_for(layout):
    """Four blocks where four stages need them, eight heads where four ranks share them; two and four otherwise."""
    heads = {"num_attention_heads": 8, "num_kv_heads": 4} if layout.tp > 2 else {}
    return {"num_layers": 4 if layout.pp > 2 else 2, **heads}


@functools.cache
def one_rank(model, shape, micro):
    return run_distributed(train, 1, {**MODELS[model], **dict(shape)}, Layout(micro=micro), STEPS)[0]


def reference(model, layout):
    return one_rank(model, tuple(shape_for(layout).items()), 8)


def noise_floor(model, layout):
    """How far reordered sums alone move the norm: the same run in other micro-batches, on one rank."""
    other = one_rank(model, tuple(shape_for(layout).items()), 1)
    ours = reference(model, layout)["grad_norm"]
    return max(abs(a - b) / b for a, b in zip(other["grad_norm"], ours, strict=True))


def assert_same_curve(model, layout, curves, keys):
    ours = reference(model, layout)
    assert ours["loss"][-1] < ours["loss"][0], "the reference does not learn"
    assert max(ours["grad_norm"]) > keys["gradient_clipping"], "the clip is never active"
    tolerance = max(1e-5, 10 * noise_floor(model, layout))
    for rank, curve in enumerate(curves):
        where = f"{layout.name} rank {rank}"
        assert curve["loss"] == pytest.approx(ours["loss"], rel=1e-5), where
        assert curve["grad_norm"] == pytest.approx(ours["grad_norm"], rel=tolerance), where
        assert curve["eval"] == pytest.approx(ours["eval"], rel=1e-5), where


def check(model, layout):
    keys = {**MODELS[model], **shape_for(layout)}
    curves = run_distributed(train, layout.world, keys, layout, STEPS, timeout=180)
    assert_same_curve(model, layout, curves, keys)


@pytest.mark.parametrize(("model", "layout"), COVERING, ids=lambda x: getattr(x, "name", x))
def test_same_curve(model, layout):
    check(model, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), EACH, ids=lambda x: getattr(x, "name", x))
def test_same_curve_at_every_small_layout(model, layout):
    check(model, layout)


def test_same_curve_on_eight_ranks():
    check("llama", Layout(pp=2, dp=2, tp=2, zero=1, sequence_parallel=True))
