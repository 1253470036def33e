"""Model maths against Hugging Face transformers: logits and gradients on random weights, fp32, to 1e-5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron.mpu.sharding import named_parameters
from megatron.neox_arguments.schema_model import ModelConfig
from tests.model.networks import LLAMA, NEOX, VOCAB, batch, build, logits, tiny

pytestmark = pytest.mark.cpu

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Names:
    """The reference's names: of parameters outside the blocks, of the list of blocks, and of modules in a block where
    they differ from ours."""

    outside: dict[str, str]
    blocks: str
    inside: dict[str, str]


def _neox_reference(model: ModelConfig) -> tuple[torch.nn.Module, Names]:
    """A GPTNeoXForCausalLM of the same shape, and its names."""
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        intermediate_size=model.ffn_width,
        hidden_act={"gelu": "gelu", "relu": "relu"}[model.activation] if not model.bias_gelu_fusion else "gelu_fast",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(model.rotary_emb_base),
            "partial_rotary_factor": model.rotary_pct,
        },
        max_position_embeddings=model.max_position_embeddings,
        layer_norm_eps=model.layernorm_epsilon,
        use_parallel_residual=model.gpt_j_residual,
        tie_word_embeddings=not model.no_weight_tying,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attn_implementation="eager",
    )
    outside = {
        "word_embeddings.weight": "gpt_neox.embed_in.weight",
        "norm.weight": "gpt_neox.final_layer_norm.weight",
        "norm.bias": "gpt_neox.final_layer_norm.bias",
        "final_linear.weight": "lm_head.weight",
    }
    inside = {"mlp.linear1": "mlp.dense_h_to_4h", "mlp.linear2": "mlp.dense_4h_to_h"}
    return GPTNeoXForCausalLM(config), Names(outside, "gpt_neox.layers", inside)


def _llama_reference(model: ModelConfig) -> tuple[torch.nn.Module, Names]:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_kv_heads,
        intermediate_size=model.ffn_width,
        rms_norm_eps=model.rms_norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_emb_base)},
        max_position_embeddings=model.max_position_embeddings,
        attention_bias=model.use_bias_in_attn_linear,
        mlp_bias=model.use_bias_in_mlp,
        tie_word_embeddings=not model.no_weight_tying,
        attn_implementation="eager",
    )
    outside = {
        "word_embeddings.weight": "model.embed_tokens.weight",
        "norm.scale": "model.norm.weight",
        "final_linear.weight": "lm_head.weight",
    }
    inside = {"attention.dense": "self_attn.o_proj", "mlp.linear2": "mlp.down_proj"}
    return LlamaForCausalLM(config), Names(outside, "model.layers", inside)


def _per_head(fused: Tensor, model: ModelConfig) -> Tensor:
    """[Q | K | V] rows -> GPT-NeoX's rows: for each head q, k, v."""
    parts = fused.view(3, model.num_attention_heads, model.head_dim, *fused.shape[1:])
    return parts.transpose(0, 1).reshape(fused.shape)


def _exported(ours: Weights, model: ModelConfig, names: Names, llama: bool) -> Weights:
    """Our tensors (weights or gradients) under the reference's names and row orders."""
    out: Weights = {}
    for name, value in ours.items():
        index, _, local = name.partition(".")
        if not 2 <= int(index) < model.num_layers + 2:
            out[names.outside[local]] = value
            continue
        prefix = f"{names.blocks}.{int(index) - 2}"
        stem, _, leaf = local.rpartition(".")
        leaf = {"scale": "weight"}.get(leaf, leaf)
        if llama and stem == "attention.query_key_value":
            q, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
            for part, rows in zip("qkv", value.split((q, kv, kv)), strict=True):
                out[f"{prefix}.self_attn.{part}_proj.{leaf}"] = rows
        elif llama and stem == "mlp.linear1":
            for part, rows in zip(("up", "gate"), value.chunk(2), strict=True):
                out[f"{prefix}.mlp.{part}_proj.{leaf}"] = rows
        else:
            value = _per_head(value, model) if stem == "attention.query_key_value" else value
            out[f"{prefix}.{names.inside.get(stem, stem)}.{leaf}"] = value
    return out


def _compare(changes: dict[str, Any], llama: bool) -> None:
    model = tiny(**changes)
    network = build(model)
    reference, names = (_llama_reference if llama else _neox_reference)(model)
    full = {name: p.detach()[: p.spec.shape[0]] for name, p in named_parameters(network)}
    exported = _exported(full, model, names, llama)
    missing, unexpected = reference.load_state_dict(exported, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"} - set(exported)
    reference.tie_weights()
    tokens, positions, targets = batch()

    mine = logits(network, tokens, positions)
    theirs = reference(tokens, position_ids=positions).logits
    assert (mine - theirs).abs().max() < 1e-5

    mask = torch.rand(targets.shape, generator=torch.Generator().manual_seed(3))
    network((tokens, positions), (targets, mask, torch.tensor([0.1])))[0].backward()
    losses = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), targets.flatten(), reduction="none")
    (losses * mask.flatten() * 0.1).sum().backward()
    gradients = _exported({n: p.grad[: p.spec.shape[0]] for n, p in named_parameters(network)}, model, names, llama)
    expected = dict(reference.named_parameters())
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert (gradient - expected[name].grad).abs().max() < 1e-5 * max(1.0, gradient.abs().max().item()), name


@pytest.mark.parametrize(
    "changes",
    [
        {"gpt_j_residual": True},
        {"gpt_j_residual": False},
        {"rotary_pct": 1.0},
        {"rotary_emb_base": 500},
        {"no_weight_tying": False},
        {"activation": "relu"},
        {"bias_gelu_fusion": True},
        {"layernorm_epsilon": 1e-2},
        {"intermediate_size": 56},
    ],
    ids=str,
)
def test_gpt_neox(changes: dict[str, Any]) -> None:
    _compare({**NEOX, "num_kv_heads": 4, "init_method_std": 0.2, **changes}, llama=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 4},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1},
        {"use_bias_in_attn_linear": True, "use_bias_in_mlp": True},
        {"no_weight_tying": False},
        {"rms_norm_epsilon": 1e-1},
        {"rotary_emb_base": 500000},
        {"gated_width_rule": "two_thirds"},
    ],
    ids=str,
)
def test_llama(changes: dict[str, Any]) -> None:
    _compare({**LLAMA, "init_method_std": 0.2, **changes}, llama=True)
