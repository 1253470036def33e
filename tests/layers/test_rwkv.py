"""RWKV-4's recurrence against sums by definition in fp64, exactness under packing and padding, how it starts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.layers.rwkv_wkv import NOTHING, wkv
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.state import ParallelState
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu


def inputs(s: int = 37, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Keys, values [2, s, 5], decays (from none to at once) and bonuses [5]."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(2, s, 5, generator=generator) for _ in range(2))
    w, u = -torch.tensor([1e-4, 0.05, 0.6, 2.0, 150.0]), torch.randn(5, generator=generator)
    return [x.to(dtype) for x in (scale * k, v, w, u)]


def by_definition(k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor | None = None) -> Tensor:
    """Weighted means over all tokens before, written out, in fp64 [b, s, c]."""
    k, v, w, u = (x.double() for x in (k, v, w, u))
    rows = []
    for i in range(k.shape[0]):
        means = []
        for t in range(k.shape[1]):
            first = 0 if starts is None else int(starts[i, : t + 1].nonzero().max())
            exponents = [(t - 1 - j) * w + k[i, j] for j in range(first, t)] + [u + k[i, t]]
            weights = torch.softmax(torch.stack(exponents), dim=0)
            means.append((weights * v[i, first : t + 1]).sum(0))
        rows.append(torch.stack(means))
    return torch.stack(rows)


def token_by_token(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """The recurrence of equations 24 to 28 without any care for overflow, in fp64."""
    k, v, w, u = (x.double() for x in (k, v, w, u))
    numerator, denominator, y = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):
        now = torch.exp(u + k[:, t])
        y.append((numerator + now * v[:, t]) / (denominator + now))
        numerator = torch.exp(w) * numerator + torch.exp(k[:, t]) * v[:, t]
        denominator = torch.exp(w) * denominator + torch.exp(k[:, t])
    return torch.stack(y, dim=1)


def document_starts() -> Tensor:
    starts = torch.zeros(2, 37, dtype=torch.bool)
    starts[:, 0] = True
    starts[0, [5, 6, 30]] = True
    starts[1, [16, 32]] = True  # at the borders of chunks
    return starts


def relative(mine: Tensor, wanted: Tensor) -> float:
    return float((mine.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_and_gradients_are_those_of_the_definition(scale: float, chunk: int, packed: bool) -> None:
    starts = document_starts() if packed else None
    mine = [x.requires_grad_() for x in inputs(scale=scale)]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    y, wanted = wkv(*mine, starts=starts, chunk=chunk)[0], by_definition(*theirs, starts=starts)
    assert relative(y.detach(), wanted.detach()) < 1e-6
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(grad)
    wanted.backward(grad.double())
    for name, a, b in zip(("k", "v", "w", "u"), mine, theirs, strict=True):
        assert relative(a.grad, b.grad) < 1e-5, name


def test_the_definition_is_the_published_recurrence() -> None:
    assert relative(token_by_token(*inputs()), by_definition(*inputs())) < 1e-12


def test_in_fp64_it_is_exact() -> None:
    mine = inputs(dtype=torch.float64)
    assert relative(wkv(*mine)[0], token_by_token(*mine)) < 1e-13


@torch.no_grad()
def test_long_memory_is_not_rounded_away() -> None:
    """A decay of 1e-4 over 4096 tokens: in fp32 the exponents alone would be off by 1e-4."""
    k, v, w, u = inputs(4096)
    k[:, 0] = 12.0  # what stays the largest
    v[:, 0] = 5.0
    assert relative(wkv(k, v, w, u)[0], token_by_token(k, v, w, u)) < 5e-6


@pytest.mark.parametrize("key", [-3e4, 3e4])
def test_nothing_overflows(key: float) -> None:
    k, v, w, u = inputs()
    k[:, 7] = key
    parts = [x.requires_grad_() for x in (k, v, w, u)]
    y = wkv(*parts)[0]
    y.sum().backward()
    assert relative(y.detach(), by_definition(*(x.detach() for x in parts))) < 1e-6
    assert all(bool(x.grad.isfinite().all()) for x in parts)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[37], [1] * 37, [20, 1, 16], [16, 21]], ids=str)
def test_a_state_continues_where_it_was(pieces: list[int]) -> None:
    k, v, w, u = inputs()
    state, parts, done = None, [], 0
    for count in pieces:
        y, state = wkv(k[:, done : done + count], v[:, done : done + count], w, u, state=state, chunk=8)
        parts.append(y)
        done += count
        assert state.shape == (2, 3, 5)
    assert relative(torch.cat(parts, dim=1), by_definition(k, v, w, u)) < 1e-6


@torch.no_grad()
def test_documents_and_padding_count_exactly_nothing() -> None:
    starts = document_starts()
    k, v, w, u = inputs()
    whole = wkv(k, v, w, u, starts=starts, chunk=16)[0]
    k[0, :5], v[0, :5] = 50.0, -3.0  # another document before
    assert torch.equal(wkv(k, v, w, u, starts=starts, chunk=16)[0][0, 5:], whole[0, 5:])
    alone, padded = inputs(20), inputs(37)
    for x, y in zip(padded[:2], alone[:2], strict=True):
        x[:, 17:] = y
    padded[0][:, :17], padded[1][:, :17] = NOTHING, 0.0
    y = wkv(*padded[:2], *alone[2:], chunk=16)[0]
    assert bool(y.isfinite().all())
    assert torch.equal(y[:, 17:], wkv(*alone)[0]) and not y[:, :17].any()


def test_how_the_vectors_start() -> None:
    """Formulas of BlinkDL's training code, layer 1 of 3, computed one by one."""
    model = tiny(attention_config=[[["rwkv4"], "all"]], num_layers=3, dim_att=24)
    layers = gpt_layers(model, vocab_size=67, padded_vocab_size=128, state=ParallelState.single())
    block = build_layer(layers[2], 7, ParallelState.single())
    time, channel = block.time_mixing, block.channel_mixing
    assert block.pre_layernorm is None
    decays = [-5 + 8 * (i / 23) ** (0.7 + 1.3 * 0.5) for i in range(24)]
    bonuses = [math.log(0.3) + ((i + 1) % 3 - 1) * 0.5 for i in range(24)]
    mixes = [(i / 32) ** (1 - 1 / 3) for i in range(32)]
    for vector, wanted in (
        (time.time_decay, decays),
        (time.time_first, bonuses),
        (time.time_mix_key, mixes),
        (time.time_mix_value, [x + 0.3 * 0.5 for x in mixes]),
        (time.time_mix_receptance, [x**0.5 for x in mixes]),
        (channel.time_mix_key, mixes),
        (channel.time_mix_receptance, mixes),
    ):
        assert vector.flatten().tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
