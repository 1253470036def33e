"""The feed-forward layer's row order and biases, the embedding's sum, multipliers and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron.layers.carry import Carry
from megatron.layers.dropout import hidden_dropout
from megatron.layers.embedding import Embedding
from megatron.layers.mlp import DenseMLP
from megatron.mpu.initial_weights import initialize
from megatron.mpu.sharding import bind
from megatron.mpu.state import ParallelState
from tests.model.networks import VOCAB, batch, randomise_vectors, tiny

pytestmark = pytest.mark.cpu

STATE = ParallelState.single()


def _filled(layer: nn.Module) -> nn.Module:
    bind(layer, 0)
    initialize(layer, 0, STATE)
    randomise_vectors(layer, STATE)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_plain(bias: bool) -> None:
    mlp = _filled(DenseMLP(tiny(use_bias_in_mlp=bias, expansion_factor=3), STATE))
    x = torch.randn(5, 32)
    assert mlp.linear1.weight.shape == (96, 32)
    assert (mlp.linear1.bias is not None) == (mlp.linear2.bias is not None) == bias
    expected = F.linear(F.gelu(F.linear(x, mlp.linear1.weight, mlp.linear1.bias)), mlp.linear2.weight, mlp.linear2.bias)
    assert (mlp(x)[0] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "reglu", "bilinear", "glu"])
def test_gated_rows_are_up_then_gate(activation: str, bias: bool) -> None:
    mlp = _filled(DenseMLP(tiny(activation=activation, intermediate_size=40, use_bias_in_mlp=bias), STATE))
    x = torch.randn(5, 32)
    wide = F.linear(x, mlp.linear1.weight, mlp.linear1.bias)
    up, gate = wide[:, :40], wide[:, 40:]
    function = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu, "bilinear": lambda g: g, "glu": torch.sigmoid}
    function["geglu_tanh"] = lambda g: F.gelu(g, approximate="tanh")
    expected = F.linear(function[activation](gate) * up, mlp.linear2.weight, mlp.linear2.bias)
    assert (mlp(x)[0] - expected).abs().max() < 1e-6


def _embedding(**changes: Any) -> Embedding:
    return _filled(Embedding(tiny(**changes), STATE, vocab_size=VOCAB, padded_vocab_size=128))


def test_words_plus_positions() -> None:
    embedding = _embedding(pos_emb="learned")
    tokens, positions, _ = batch()
    positions = positions.flip(1)
    hidden, same, *_ = embedding(Carry(tokens, positions))
    expected = embedding.word_embeddings.weight[tokens] + embedding.position_embeddings.weight[positions]
    assert torch.equal(hidden, expected.flatten(0, 1))
    assert same is positions


def test_document_ids_travel_along() -> None:
    tokens, positions, _ = batch()
    hidden, _, doc_ids, *_ = _embedding()(Carry(tokens, positions, torch.ones_like(positions)))
    assert hidden.shape == (32, 32)
    assert doc_ids.sum() == 32


def test_mup_multipliers_act_under_mup_only() -> None:
    changes = {"pos_emb": "learned", "mup_embedding_mult": 3.0, "mup_rp_embedding_mult": 5.0}
    tokens, positions, _ = batch()
    for use, word, position in ((False, 1, 1), (True, 3, 15)):
        embedding = _embedding(**changes, **({"use_mup": True, "mup_base_hidden_size": 16} if use else {}))
        expected = word * embedding.word_embeddings.weight[tokens]
        expected = expected + position * embedding.position_embeddings.weight[positions]
        assert torch.allclose(embedding(Carry(tokens, positions))[0], expected.flatten(0, 1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_words_are_scaled_by_the_root_of_the_width_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    """sqrt(1136) = 33.70 is 33.75 in bf16; positions are not scaled."""
    changes = {"hidden_size": 1136, "head_dim": 8, "pos_emb": "learned"}
    embedding = _embedding(scale_embedding=True, **changes).to(dtype)
    tokens, positions, _ = batch()
    factor = {torch.float32: 1136**0.5, torch.bfloat16: 33.75}[dtype]
    words = (embedding.word_embeddings.weight[tokens].float() * factor).to(dtype)
    expected = words + embedding.position_embeddings.weight[positions]
    assert torch.equal(embedding(Carry(tokens, positions))[0], expected.flatten(0, 1))


def test_dropout_of_embeddings_is_hidden_dropout_unless_it_has_its_own() -> None:
    rates = [_embedding(hidden_dropout=0.25, **own).dropout for own in ({}, {"embedding_dropout": 0.0})]
    assert rates == [0.25, 0.0]


def test_a_bf16_model_keeps_a_bf16_residual_stream() -> None:
    for scheme in ("sinusoidal", "learned", "rotary"):
        tokens, positions, _ = batch()
        assert _embedding(pos_emb=scheme).bfloat16()(Carry(tokens, positions))[0].dtype == torch.bfloat16


def test_dropout_scales_what_stays_and_is_for_training_only() -> None:
    x = torch.ones(100, 50)
    dropped = hidden_dropout(x, 0.25, True, STATE)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert hidden_dropout(x, 0.25, False, STATE) is x
