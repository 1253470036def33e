"""RWKV-4 ↔ `RwkvForCausalLM`.

Their tensors have our shapes. For inference transformers halves the residual stream and what is added to it every
`rescale_every` blocks, so that fp16 does not overflow, and its norms take that out again (but for their epsilon). Files
hold the weights unscaled, and training knows no such thing; what is written is transformers' default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.convert.parts.family import FAMILIES, WORD_EMBEDDINGS, Constant, Family, Rule, TokenIds, common_refusals

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

EPSILON = 1e-5  # of transformers' last norm, whatever that of the others is
_HALVES = {
    "time_mixing": (
        "attention",
        ("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance"),
        ("key", "value", "receptance", "output"),
    ),
    "channel_mixing": ("feed_forward", ("time_mix_key", "time_mix_receptance"), ("key", "receptance", "value")),
}
_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}


def rwkv4_table(model: ModelConfig) -> list[Rule | Constant]:
    """Every tensor of a model."""
    rules: list[Rule | Constant] = [Rule(WORD_EMBEDDINGS, ("rwkv.embeddings.weight",))]
    rules += _norm("2.pre_layernorm", "rwkv.blocks.0.pre_ln")
    for block in range(model.num_layers):
        ours, theirs = f"{block + 2}.", f"rwkv.blocks.{block}."
        for name, their_name in _NORMS.items():
            rules += _norm(f"{ours}{name}", f"{theirs}{their_name}")
        for half, (their_half, vectors, matrices) in _HALVES.items():
            for name in (*vectors, *(f"{matrix}.weight" for matrix in matrices)):
                rules.append(Rule(f"{ours}{half}.{name}", (f"{theirs}{their_half}.{name}",)))
    rules += _norm(f"{model.num_layers + 3}.norm", "rwkv.ln_out")
    if model.no_weight_tying:
        rules.append(Rule(f"{model.num_layers + 4}.final_linear.weight", ("head.weight",)))
    return rules


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.{name}", (f"{theirs}.{name}",)) for name in ("weight", "bias")]


def rwkv4_config(model: ModelConfig, vocab_size: int, ids: TokenIds) -> dict[str, Any]:
    """`RwkvConfig`."""
    return {
        "model_type": "rwkv",
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "attention_hidden_size": model.dim_att,
        "intermediate_size": model.ffn_dim,
        "context_length": model.max_position_embeddings,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "rescale_every": 6,
        "use_cache": True,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": not model.no_weight_tying,
    }


def rwkv4_refusals(model: ModelConfig) -> list[str]:
    """What `RwkvForCausalLM` cannot express."""
    reasons = common_refusals(replace(model, attention_config=None))
    if set(model.attention_config or ()) != {"rwkv4"}:
        reasons.append("attention_config with other kinds than rwkv4")
    if model.pos_emb not in ("none", "rotary", "alibi"):  # the last two act in attention only
        reasons.append(f"pos_emb: {model.pos_emb} (it has no positions)")
    if model.norm != "layernorm":
        reasons.append(f"norm: {model.norm} (it has layernorm only)")
    if model.layernorm_epsilon != EPSILON:
        reasons.append(f"layernorm_epsilon: {model.layernorm_epsilon} (its last norm has {EPSILON})")
    if model.dim_att != model.hidden_size:
        reasons.append(f"dim_att: {model.dim_att} (its state has hidden_size channels)")
    return reasons


FAMILIES.register("rwkv4")(Family("RwkvForCausalLM", rwkv4_table, rwkv4_config, rwkv4_refusals))
