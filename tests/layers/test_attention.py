"""The attention layer around the back-end: fused projection, query/key norms, scale, window, dropout, cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import UserError
from megatron.layers.attention import SelfAttention
from megatron.layers.carry import Context
from megatron.layers.kv_cache import KVCache, left_padded_positions
from megatron.layers.parts import BlockSpec
from megatron.layers.positions.rotary import Rotary
from megatron.mpu.initial_weights import initialize
from megatron.mpu.sharding import bind
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.model.networks import batch, build, logits, randomise_vectors, tiny

pytestmark = pytest.mark.cpu

STATE = ParallelState.single()
POSITIONS = torch.arange(16).expand(2, 16)


def _layer(window: int | None = None, vocabulary: int = 0, **changes: Any) -> SelfAttention:
    model = tiny(init_method_std=0.3, **changes)
    rotary = Rotary.of(model, STATE) if model.pos_emb == "rotary" else None
    layer = SelfAttention(model, STATE, BlockSpec(window=window, rotary=rotary, vocabulary=vocabulary))
    bind(layer, 2)
    initialize(layer, 0, STATE)
    randomise_vectors(layer, STATE)
    return layer


def _x() -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(5))


def test_a_lost_bias_of_positions_is_an_error() -> None:
    layer = _layer(pos_emb="rpe")
    assert layer(_x(), Context(POSITIONS, shared=torch.zeros(32, 4))).isfinite().all()
    with pytest.raises(RuntimeError, match="shared"):
        layer(_x(), Context(POSITIONS))


@pytest.mark.parametrize("channels", [12, 32])
def test_value_embeddings_are_added_to_the_values_times_a_gate_per_head(
    monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    """v + 2 sigmoid(G x[:12]) E[token], in fp64, head by head and token by token; and what is handed on too little."""
    monkeypatch.setattr("megatron.layers.value_embeddings.VALUE_GATE_CHANNELS", channels)
    layer, tokens = _layer(vocabulary=67, pos_emb="none").double(), torch.arange(32).view(2, 16) * 2
    table, gate = layer.value_embeddings.weight, layer.value_embeddings.gate
    assert gate.shape == (2, channels) and table.std().item() == pytest.approx(0.3, rel=0.1)
    with torch.no_grad():
        gate.normal_(generator=torch.Generator().manual_seed(3))
    x, seen = _x().double(), []
    monkeypatch.setattr(layer, "attend", lambda q, k, v, call: (seen.append(v), q)[1])
    layer(x, Context(POSITIONS, tokens=tokens))
    plain = (x @ layer.query_key_value.weight.T + layer.query_key_value.bias)[:, 48:]
    for t, token in enumerate(tokens.flatten().tolist()):
        for head in range(2):
            strength = 2 / (1 + torch.exp(-sum(gate[head, i] * x[t, i] for i in range(channels))))
            expected = plain[t].view(2, 8)[head] + strength * table[token].view(2, 8)[head]
            assert (seen[0].reshape(32, 2, 8)[t, head] - expected).abs().max() < 1e-12
    with pytest.raises(RuntimeError, match="tokens"):
        layer(x, Context(POSITIONS))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_rows_of_the_fused_projection_are_q_k_v(kv_heads: int) -> None:
    """Written out with three separate projections, from the rows [Q | K | V]."""
    layer = _layer(num_kv_heads=kv_heads, pos_emb="none")
    x = _x()
    weight, bias = layer.query_key_value.weight, layer.query_key_value.bias
    rows = (32, 8 * kv_heads, 8 * kv_heads)
    q, k, v = (
        F.linear(x, w, b).view(2, 16, -1, 8).transpose(1, 2)
        for w, b in zip(weight.split(rows), bias.split(rows), strict=True)
    )
    k, v = (t.repeat_interleave(4 // kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(32, 32)
    expected = F.linear(mixed, layer.dense.weight, layer.dense.bias)
    assert (layer(x, Context(POSITIONS)) - expected).abs().max() < 1e-5


def test_mup_divides_scores_by_the_head_width() -> None:
    assert _layer().scale == pytest.approx(8**-0.5)
    assert _layer(use_mup=True, mup_base_hidden_size=16).scale == pytest.approx(1 / 8)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_qk_layernorm_is_over_each_head(norm: str) -> None:
    """Scaling one head's rows of Q or K changes nothing (without biases): each head is normalised by itself."""
    layer = _layer(use_qk_layernorm=True, norm=norm, use_bias_in_attn_linear=False)
    before = layer(_x(), Context(POSITIONS))
    with torch.no_grad():
        layer.query_key_value.weight[8:16] *= 3  # query head 1
        layer.query_key_value.weight[32:40] *= 5  # key head 0
    assert (layer(_x(), Context(POSITIONS)) - before).abs().max() < 1e-3
    with torch.no_grad():
        layer.query_key_value.weight[48:56] *= 3  # value head 0
    assert (layer(_x(), Context(POSITIONS)) - before).abs().max() > 1e-2


def test_separate_qk_norms_are_over_all_heads() -> None:
    """With use_qk_layernorm, as in GPT-NeoX's fork, where use_separate_qk_norms alone builds none; its parameters."""
    assert _layer(use_separate_qk_norms=True).q_norm is None
    layer = _layer(use_qk_layernorm=True, use_separate_qk_norms=True, norm="rmsnorm", use_bias_in_attn_linear=False)
    assert [name for name, _ in layer.named_parameters() if "norm" in name] == ["q_norm.scale", "k_norm.scale"]
    assert layer.q_norm.scale.shape == (32,)
    assert layer.k_norm.scale.shape == (16,)
    before = layer(_x(), Context(POSITIONS))
    q, k, _ = layer.double()._project(_x().double(), torch.zeros_like(POSITIONS), entered=False)
    for normed, rows, norm in ((q, slice(0, 32), layer.q_norm), (k, slice(32, 48), layer.k_norm)):
        plain = _x().double() @ layer.query_key_value.weight[rows].T
        expected = plain / (plain.square().mean(-1, keepdim=True) + 1e-8).sqrt() * norm.scale
        assert (normed.reshape(32, -1) - expected).abs().max() < 1e-6
    layer.float()
    with torch.no_grad():
        layer.query_key_value.weight[:32] *= 3
    assert (layer(_x(), Context(POSITIONS)) - before).abs().max() < 1e-3
    with torch.no_grad():
        layer.query_key_value.weight[8:16] *= 3  # one head against the others
    assert (layer(_x(), Context(POSITIONS)) - before).abs().max() > 1e-3


def test_the_window_reaches_the_back_end() -> None:
    layer, x = _layer(window=3), _x()
    before = layer(x, Context(POSITIONS))
    x = x.clone()
    x[4] += 1  # row 0, column 4: seen by columns 4..7
    changed = (layer(x, Context(POSITIONS)) - before).abs().amax(-1).view(2, 16) > 0
    assert changed.nonzero().tolist() == [[0, 4], [0, 5], [0, 6], [0, 7]]


def test_attention_dropout_is_for_training_only() -> None:
    layer, x = _layer(attention_dropout=0.5), _x()
    assert not torch.equal(layer(x, Context(POSITIONS)), layer(x, Context(POSITIONS)))
    layer.eval()
    plain = _layer()
    assert torch.equal(layer(x, Context(POSITIONS)), plain(x, Context(POSITIONS)))


@pytest.mark.parametrize("key", ["num_attention_heads", "num_kv_heads"])
def test_heads_that_do_not_divide_are_refused(key: str) -> None:
    state = ParallelState(Topology({"pipe": 1, "data": 1, "model": 4}), 0, torch.device("cpu"))
    heads = {"num_attention_heads": {"num_attention_heads": 2}, "num_kv_heads": {"num_kv_heads": 2}}[key]
    with pytest.raises(UserError, match=f"{key}: 2 cannot be split over model_parallel_size=4"):
        SelfAttention(tiny(**heads), state, BlockSpec())


CACHED: list[dict[str, Any]] = [
    {},
    {"pos_emb": "alibi"},
    {"pos_emb": "learned"},
    {"pos_emb": "sinusoidal", "use_qk_layernorm": True},
    {"sliding_window_width": 4},
    {"gpt_j_residual": True, "rotary_pct": 0.25, "num_kv_heads": 4},
    {"intra_document_masking": True, "checkpoint_activations": True},
]


@pytest.mark.parametrize("changes", CACHED, ids=str)
@pytest.mark.parametrize("pieces", [[16], [9, 1, 1, 1, 1, 1, 1, 1], [1] * 16, [5, 4, 7]], ids=str)
@torch.no_grad()
def test_with_a_cache_logits_are_the_same(changes: dict[str, Any], pieces: list[int]) -> None:
    network = build(tiny(init_method_std=0.2, **changes)).eval()
    tokens, positions, _ = batch()
    whole = logits(network, tokens, positions)
    cache = KVCache(network.sequential, capacity=16)
    parts, done = [], 0
    for count in pieces:
        columns = slice(done, done + count)
        inputs = (tokens[:, columns], positions[:, columns])
        parts.append(network(inputs, cache=cache, then=lambda out: out.logits()))
        done += count
        assert cache.length == done
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("changes", CACHED, ids=str)
@torch.no_grad()
def test_left_padded_prompts_of_different_lengths(changes: dict[str, Any]) -> None:
    """Each row of a padded batch gives what it gives alone, whatever the pad tokens are."""
    network = build(tiny(init_method_std=0.2, **changes)).eval()
    tokens, positions, _ = batch(rows=3)
    start = torch.tensor([0, 4, 7])
    alone = [logits(network, tokens[i : i + 1, n:], positions[:1, : 16 - n])[0] for i, n in enumerate(start.tolist())]
    for pad in (0, 66):
        padded = torch.where(torch.arange(16) < start[:, None], pad, tokens)
        cache = KVCache(network.sequential, capacity=20, start=start)
        parts = []
        for first, count in ((0, 10), (10, 1), (11, 5)):
            inputs = (padded[:, first : first + count], left_padded_positions(start, first, count))
            parts.append(network(inputs, cache=cache, then=lambda out: out.logits()))
        together = torch.cat(parts, dim=1)
        for i, n in enumerate(start.tolist()):
            assert (together[i, n:] - alone[i]).abs().max() < 1e-5


def test_cache_limits_and_size() -> None:
    network = build(tiny()).eval()
    tokens, positions, _ = batch()
    cache = KVCache(network.sequential, capacity=8)
    with torch.no_grad():
        network((tokens[:, :8], positions[:, :8]), cache=cache)
        assert cache.bytes() == 2 * 2 * (2 * 8 * 2 * 8) * 4  # layers, k and v, [b, capacity, n_kv, d], fp32
        with pytest.raises(ValueError, match="8 tokens cannot take 1 more"):
            network((tokens[:, :1], positions[:, :1]), cache=cache)
