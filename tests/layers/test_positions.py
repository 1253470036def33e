"""Position schemes against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.errors import UserError
from megatron.layers.positions import POSITIONS
from megatron.layers.positions.alibi import alibi_slopes
from megatron.layers.positions.rotary import Rotary
from megatron.mpu.initial_weights import initialize
from megatron.mpu.sharding import bind
from megatron.mpu.state import ParallelState
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu

STATE = ParallelState.single()
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dims", "base"), [(8, 10000.0), (4, 10000.0), (2, 500.0)])
def test_rotary_turns_each_pair_by_its_angle(dims: int, base: float) -> None:
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 9]])
    expected = x.clone()
    half = dims // 2
    for i in range(half):
        angle = positions.double()[..., None] * base ** (-2 * i / dims)
        a, b = x[..., i], x[..., i + half]
        expected[..., i] = a * angle.cos() - b * angle.sin()
        expected[..., i + half] = a * angle.sin() + b * angle.cos()
    out = Rotary(dims, base, 16, CPU)(x.float(), positions)
    assert (out - expected).abs().max() < 1e-5
    assert torch.equal(out[..., dims:], x.float()[..., dims:])


def test_rotary_scores_depend_on_the_distance_only() -> None:
    rotary = Rotary(8, 10000.0, 128, CPU)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> float:
        return (rotary(q, torch.tensor([[i]])) * rotary(k, torch.tensor([[j]]))).sum().item()

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-4)


def test_rotary_tables_stay_fp32_when_the_model_is_cast() -> None:
    rotary = Rotary(8, 10000.0, 4096, CPU).bfloat16().half()
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    # In bf16 positions 4001 and 4002 would share their angles.
    assert not torch.equal(rotary.cos[4001], rotary.cos[4002])
    assert rotary(torch.randn(1, 2, 1, 8, dtype=torch.bfloat16), torch.tensor([[1, 2]])).dtype == torch.bfloat16


def test_rotary_refuses_an_odd_share_of_the_head() -> None:
    model = tiny(rotary_pct=0.25, num_attention_heads=2, num_kv_heads=2)
    assert Rotary.of(model, STATE).dims == 4
    with pytest.raises(UserError, match="rotary_pct"):
        tiny(rotary_pct=0.4)


def test_sinusoidal_is_the_published_formula() -> None:
    table = POSITIONS["sinusoidal"].at_embedding(tiny(pos_emb="sinusoidal"), STATE)
    positions = torch.tensor([[0, 1, 2], [7, 3, 0]])
    out = table(positions).view(2, 3, 32)
    for i in range(16):
        angle = positions.double() / 10000 ** (2 * i / 32)
        assert (out[..., i] - angle.sin()).abs().max() < 1e-6
        assert (out[..., 16 + i] - angle.cos()).abs().max() < 1e-6


def test_learned_positions_read_the_row_plus_the_offset() -> None:
    model = tiny(pos_emb="learned", seq_length=14, opt_pos_emb_offset=2)
    learned = POSITIONS["learned"].at_embedding(model, STATE)
    bind(learned, 0)
    initialize(learned, 0, STATE)
    positions = torch.tensor([[0, 5], [13, 1]])
    assert torch.equal(learned(positions), learned.weight[(positions + 2).flatten()])
    with pytest.raises(UserError, match="max_position_embeddings"):
        POSITIONS["learned"].at_embedding(tiny(pos_emb="learned", seq_length=15, opt_pos_emb_offset=2), STATE)


def test_alibi_slopes() -> None:
    # From the paper: 8 heads start at 1/2 with ratio 1/2; 16 heads at 1/sqrt(2).
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16)[:3] == pytest.approx([2**-0.5, 2**-1, 2**-1.5])
    assert alibi_slopes(1) == [2.0**-8]
    # 12 heads: those of 8, then every second one of 16.
    assert alibi_slopes(12) == pytest.approx([2.0**-i for i in range(1, 9)] + [2 ** -(0.5 + i) for i in range(4)])
    assert all(len(alibi_slopes(n)) == n and not math.isnan(sum(alibi_slopes(n))) for n in range(1, 70))


def test_each_scheme_acts_where_it_should() -> None:
    acting = {name: [part for part, made in vars(POSITIONS[name]).items() if made] for name in POSITIONS}
    assert acting == {
        "none": [],
        "rotary": ["in_attention"],
        "learned": ["at_embedding"],
        "sinusoidal": ["at_embedding"],
        "alibi": ["slopes"],
    }
