"""RWKV-6 against its formulas written out token by token in fp64: the recurrence, and both halves of a block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.layers.carry import Carry
from megatron.layers.rwkv_wkv6 import wkv6
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.state import ParallelState
from tests.layers.test_rwkv import document_starts, relative
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """r, k, v, w [2, 37, 3, 4], decays from almost none to at once, and u [3, 4]."""
    generator = torch.Generator().manual_seed(3)
    r, k, v, w = (torch.randn(2, 37, 3, 4, generator=generator) for _ in range(4))
    return [x.to(dtype) for x in (r, k, v, -torch.exp(3 * w), torch.randn(3, 4, generator=generator))]


def token_by_token(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor | None = None) -> Tensor:
    """The published recurrence over the sequence, in fp64 [b, s, n, d]."""
    r, k, v, w, u = (x.double() for x in (r, k, v, w, u))
    rows = []
    for i in range(r.shape[0]):
        for head in range(r.shape[2]):
            memory = torch.zeros(r.shape[3], v.shape[3], dtype=torch.float64)
            for t in range(r.shape[1]):
                if starts is not None and starts[i, t]:
                    memory = torch.zeros_like(memory)
                new = torch.outer(k[i, t, head], v[i, t, head])
                rows.append(r[i, t, head] @ (memory + torch.diag(u[head]) @ new))
                memory = torch.diag(torch.exp(w[i, t, head])) @ memory + new
    return torch.stack(rows).view(r.shape[0], r.shape[2], r.shape[1], -1).transpose(1, 2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_values_and_gradients_are_those_of_the_recurrence(chunk: int, packed: bool) -> None:
    starts = document_starts() if packed else None
    mine = [x.requires_grad_() for x in inputs()]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    y, wanted = wkv6(*mine, starts=starts, chunk=chunk)[0], token_by_token(*theirs, starts=starts)
    assert relative(y.detach(), wanted.detach()) < 1e-6
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(grad)
    wanted.backward(grad.double())
    for name, a, b in zip(("r", "k", "v", "w", "u"), mine, theirs, strict=True):
        assert relative(a.grad, b.grad) < 1e-5, name


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[37], [1] * 37, [20, 1, 16], [16, 21]], ids=str)
def test_a_state_continues_where_it_was(pieces: list[int]) -> None:
    r, k, v, w, u = inputs()
    state, parts, done = None, [], 0
    for count in pieces:
        now = slice(done, done + count)
        y, state = wkv6(r[:, now], k[:, now], v[:, now], w[:, now], u, state=state, chunk=8)
        parts.append(y)
        done += count
    assert relative(torch.cat(parts, dim=1), token_by_token(r, k, v, w, u)) < 1e-6


@torch.no_grad()
def test_another_document_counts_exactly_nothing() -> None:
    starts = document_starts()
    parts = inputs()
    whole = wkv6(*parts, starts=starts, chunk=16)[0]
    parts[1][0, :5], parts[2][0, :5] = 50.0, -3.0
    assert torch.equal(wkv6(*parts, starts=starts, chunk=16)[0][0, 5:], whole[0, 5:])


@torch.no_grad()
def test_a_block_is_the_published_one() -> None:
    """Both halves with random weights, every step in fp64 and for one token after the other."""
    model = tiny(attention_config=[[["rwkv"], "all"]], norm="layernorm", pos_emb="none", head_size=8, dim_att=24)
    layers = gpt_layers(model, vocab_size=67, padded_vocab_size=128, state=ParallelState.single())
    block = build_layer(layers[2], 7, ParallelState.single()).eval()
    generator = torch.Generator().manual_seed(1)
    for p in block.parameters():
        p.normal_(0, 0.3, generator=generator)
    x, positions = torch.randn(2, 16, 32, generator=generator), torch.arange(16).expand(2, 16)
    mine = block(Carry(x.reshape(32, 32), positions)).hidden.view(2, 16, 32)
    p = {name: value.double() for name, value in block.named_parameters()}

    def norm(y: Tensor, name: str) -> Tensor:
        centred = y - y.mean()
        return centred / (centred.square().mean() + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    for row in range(2):
        memory, before, before2 = torch.zeros(3, 8, 8, dtype=torch.float64), *torch.zeros(2, 32, dtype=torch.float64)
        for t in range(16):
            hidden = x[row, t].double()
            now = norm(hidden, "input_layernorm")
            change = before - now
            before = now
            t_ = {name.partition(".")[2]: value for name, value in p.items() if name.startswith("time_mixing.")}
            low = torch.tanh((now + change * t_["time_maa_x"].flatten()) @ t_["time_maa_w1"]).view(5, 32)
            w, k, v, r, g = (
                now + change * (t_[f"time_maa_{name}"].flatten() + low[i] @ t_["time_maa_w2"][i])
                for i, name in enumerate("wkvrg")
            )
            fade = t_["time_decay"].flatten() + torch.tanh(w @ t_["time_decay_w1"]) @ t_["time_decay_w2"]
            kept = torch.exp(-torch.exp(fade)).view(3, 8)
            r, k, v = (
                (t_[f"{name}.weight"] @ part).view(3, 8) for name, part in (("receptance", r), ("key", k), ("value", v))
            )
            y = torch.zeros(3, 8, dtype=torch.float64)
            for head in range(3):
                new = torch.outer(k[head], v[head])
                y[head] = r[head] @ (memory[head] + t_["time_faaaa"][head].unsqueeze(1) * new)
                memory[head] = kept[head].unsqueeze(1) * memory[head] + new
            centred = y - y.mean(1, keepdim=True)
            y = (centred / (centred.square().mean(1, keepdim=True) + 64e-5).sqrt()).flatten()
            gate = t_["gate.weight"] @ g
            y = (y * t_["ln_x.weight"] + t_["ln_x.bias"]) * gate * torch.sigmoid(gate)
            hidden = hidden + t_["output.weight"] @ y

            now = norm(hidden, "post_attention_layernorm")
            change = before2 - now
            before2 = now
            c = {name.partition(".")[2]: value for name, value in p.items() if name.startswith("channel_mixing.")}
            key = torch.relu(c["key.weight"] @ (now + change * c["time_maa_k"].flatten())).square()
            receptance = torch.sigmoid(c["receptance.weight"] @ (now + change * c["time_maa_r"].flatten()))
            hidden = hidden + receptance * (c["value.weight"] @ key)
            assert relative(mine[row, t], hidden) < 2e-6, (row, t)


def test_how_the_vectors_start() -> None:
    """Formulas of BlinkDL's training code, layer 1 of 3, computed one by one."""
    model = tiny(attention_config=[[["rwkv"], "all"]], num_layers=3, dim_att=24, head_size=8)
    layers = gpt_layers(model, vocab_size=67, padded_vocab_size=128, state=ParallelState.single())
    block = build_layer(layers[2], 7, ParallelState.single())
    time, channel = block.time_mixing, block.channel_mixing
    mixes = [1 - (i / 32) ** (1 - 1 / 3) for i in range(32)]
    halves = [1 - (i / 32) ** (0.5 * (1 - 1 / 3)) for i in range(32)]
    for vector, wanted in (
        (time.time_decay, [-6 + 5 * (i / 23) ** (0.7 + 1.3 * 0.5) for i in range(24)]),
        (time.time_faaaa, [0.5 * (1 - i / 23) + ((i + 1) % 3 - 1) * 0.1 for i in range(24)]),
        (time.time_maa_x, mixes),
        (time.time_maa_w, mixes),
        (time.time_maa_k, mixes),
        (time.time_maa_v, [x - 0.3 * 0.5 for x in mixes]),
        (time.time_maa_r, halves),
        (time.time_maa_g, halves),
        (channel.time_maa_k, mixes),
        (channel.time_maa_r, mixes),
    ):
        assert vector.flatten().tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    for name in ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2"):
        assert 0 < float(getattr(time, name).abs().max()) <= 1e-4
