"""Position schemes against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.errors import UserError
from megatron.layers.attention_backends import choose_backend
from megatron.layers.attention_contract import ATTENTION_BACKENDS, Call, Task
from megatron.layers.positions import POSITIONS
from megatron.layers.positions.alibi import alibi_slopes
from megatron.layers.positions.rotary import Rotary
from megatron.layers.positions.rpe import RelativePositions, distance_buckets, score_bias
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


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (6, 9), (2, 40)])
def test_relative_positions_are_t5s(buckets: int, reach: int) -> None:
    """The bucket of each distance in whole numbers (fp64 away from borders), and scores with the bias against fp64."""
    for distance, bucket in enumerate(distance_buckets(200, buckets, reach, CPU).tolist()):
        exact = buckets // 2
        place = distance if distance < exact else exact + math.log(distance / exact) / math.log(reach / exact) * exact
        place = min(place, buckets - 1)
        assert bucket == math.floor(place) or abs(place - round(place)) < 1e-6 and bucket in (place - 1, round(place))
    model = tiny(pos_emb="rpe", rpe_num_buckets=buckets, rpe_max_distance=reach)
    positions = RelativePositions(model, STATE)
    bind(positions, 0)
    initialize(positions, 0, STATE)
    table, q, k, v = positions(), *(torch.randn(2, s, 4, 8, requires_grad=True) for s in (7, 12, 12))
    assert table.std().item() == pytest.approx(8**0.5 * (2 / (buckets + 4)) ** 0.5, rel=0.5)
    outs = []
    for backend in ("torch", "manual"):
        attend = ATTENTION_BACKENDS[backend]().attend
        outs.append(attend(q, k, v, Call(0.3, bias=score_bias(model, table, 7, 12))))
    assert (outs[0] - outs[1]).abs().max() < 1e-6
    gradient = torch.autograd.grad(outs[0].square().sum(), positions.weight, retain_graph=True)[0]
    weight = positions.weight.detach().double().requires_grad_()
    wide, seen = (x.detach().double() for x in (q, k, v)), torch.ones(7, 12).tril(5).bool()
    far = (torch.arange(5, 12)[:, None] - torch.arange(12)).clamp(min=0)
    bias = 8**0.5 * weight[distance_buckets(12, buckets, reach, CPU)[far]].permute(2, 0, 1)
    a, b, c = wide
    scores = torch.einsum("bsnd,btnd->bnst", a, b) * 0.3 + bias
    expected = torch.einsum("bnst,btnd->bsnd", scores.masked_fill(~seen, -math.inf).softmax(-1), c)
    assert (outs[0] - expected).abs().max() < 1e-6
    exact = torch.autograd.grad(expected.square().sum(), weight)[0]
    assert (gradient - exact).abs().max() < 1e-6 * exact.abs().max()


def test_back_ends_that_cannot_add_a_bias_are_not_taken() -> None:
    task = Task(CPU, documents=True, bias=True)
    assert choose_backend(task).name == "torch" and choose_backend(replace(task, softcap=True)).name == "manual"
    with pytest.raises(UserError, match="varlen .*pos_emb: rpe"):
        choose_backend(task, "varlen")


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
        "rpe": ["shared", "score_bias"],
    }
