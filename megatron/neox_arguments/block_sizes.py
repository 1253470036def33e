"""Parameters and arithmetic of the parts of a block: one entry per kind of mixer and of feed-forward. Torch-free.

A block is what `attention_config` and `layer_mlps` name for its layer: norms, a mixer (attention, ...) and a
feed-forward (dense, ...; a kind of block may have none).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.errors import UserError
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.registry import added, measure
from megatron.rows import row, rows

ATTENTION = ("global", "flash", "local")  # kinds of mixer
MAMBA = ("mamba", "mamba2")  # kinds of mixer whose blocks have no feed-forward
RWKV = ("rwkv4", "rwkv")  # whose blocks have one of their own
GMLP = ("gmlp", "amlp")  # which are no mixer and no feed-forward, but both
RECURRENT = (*MAMBA, *RWKV)
HEADLESS = (*RECURRENT, *GMLP)  # which need neither heads nor positions
RWKV6_MIX_RANK, RWKV6_DECAY_RANK = 32, 64  # as published, whatever the width
VALUE_GATE_CHANNELS = 12  # of the hidden states, which a gate of value embeddings reads
BLOCK = "block of attention_config"  # the registry of kinds of mixer that are a block of their own


@dataclass(frozen=True)
class Size:
    """Parameters of a part.

    Attributes:
        split: divided over tensor-parallel ranks. replicated: held whole by each of them.
        experts: those of `split` that are experts' (expert-parallel ranks divide them further).
        idle: those that one token does not use (experts it is not sent to).
    """

    split: int = 0
    replicated: int = 0
    experts: int = 0
    idle: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.split + other.split,
            self.replicated + other.replicated,
            self.experts + other.experts,
            self.idle + other.idle,
        )

    @property
    def total(self) -> int:
        return self.split + self.replicated

    @property
    def active(self) -> int:
        """What one token uses."""
        return self.total - self.idle

    def local(self, tp: int, ep: int = 1) -> int:
        """What one of `tp` tensor- and `ep` expert-parallel ranks holds."""
        return (self.split - self.experts) // tp + self.experts // (tp * ep) + self.replicated


@dataclass(frozen=True)
class MixerCost:
    """A kind of mixer: its parameters, and the training FLOPs per token that are not products with weights."""

    size: Callable[[ModelConfig], Size]
    flops: Callable[[ModelConfig], float]


def is_gated(activation: str) -> bool:
    """Whether an activation acts on a gate that multiplies a second projection."""
    return bool(row("activation", activation).get("gated"))


def added_size(registry: str, name: str, model: ModelConfig, *context: Any) -> Size:
    """Size of what a plugin registered: by its own `size(model, ...)`, else counted (`registry.measure`)."""
    formula = getattr(added(registry)[name], "size", None)
    size: Size = measure(registry, name, model, *context) if formula is None else formula(model, *context)
    return size


def norm_parameters(model: ModelConfig, width: int) -> int:
    """Parameters of one norm over `width` features."""
    found = row("norm", model.norm)
    if "vectors" in found or "numbers" in found:
        return int(found.get("vectors", 0)) * width + int(found.get("numbers", 0))
    if model.norm in added("norm"):
        return added_size("norm", model.norm, model, width).total
    place = rows("norm")[model.norm].place
    raise UserError(f"{place}: norm {model.norm!r}: register it with vectors=, the number of its vectors of parameters")


def position_parameters(model: ModelConfig) -> int:
    """Parameters of the position scheme at the embedding."""
    name = model.pos_emb
    found = row("pos_emb", name)
    if "table" not in found and name in added("pos_emb"):
        return added_size("pos_emb", name, model).total
    if "table" not in found:
        place = rows("pos_emb")[name].place
        raise UserError(
            f"{place}: pos_emb {name!r}: register it with table=, the shape of its parameter, or table=None"
        )
    shape = found["table"]
    return 0 if shape is None else math.prod(getattr(model, one) if isinstance(one, str) else one for one in shape)


def attention_size(model: ModelConfig) -> Size:
    h, heads, kv, d = model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_dim
    qkv_rows = (heads + 2 * kv) * d
    split, replicated = qkv_rows * h + h * heads * d, 0
    if model.use_bias_in_attn_linear:
        split += qkv_rows
        replicated += h * model.use_bias_in_attn_output
    if model.use_separate_qk_norms and model.qk_norm_per_head:
        replicated += 2 * d
    elif model.use_separate_qk_norms:
        split += (heads + kv) * d
    elif model.use_qk_layernorm:
        replicated += norm_parameters(model, d)  # one norm over the head dimension, for queries and keys
    return Size(split, replicated)


def attention_flops(model: ModelConfig) -> float:
    """Scores and weighted values, forward and backward; the causal half counts too, as in most published figures."""
    return 12.0 * model.num_attention_heads * model.head_dim * model.seq_length


def dense_size(model: ModelConfig) -> Size:
    h, f = model.hidden_size, model.ffn_width
    up_rows = 2 * f if is_gated(model.activation) else f
    bias = model.use_bias_in_mlp
    return Size(up_rows * h + h * f + up_rows * bias, h * bias)


def moe_size(model: ModelConfig) -> Size:
    """Router, experts and a shared expert. A token uses moe_top_k of the experts."""
    h, f, shared, count = (
        model.hidden_size, model.moe_intermediate_size, model.moe_shared_expert_size, model.moe_num_experts
    )  # fmt: skip
    gates = 2 if is_gated(model.activation) else 1
    expert = (gates + 1) * f * h + model.moe_expert_bias * (gates * f + h)
    router = count * h + count * (model.moe_bias_balancing_rate > 0) + h * model.moe_shared_expert_gate
    experts, idle = count * expert, (count - model.moe_top_k) * expert
    return Size(experts + (gates + 1) * shared * h, router, experts, idle)


def mamba_size(model: ModelConfig) -> Size:
    h, inner, n, rank = (
        model.hidden_size,
        model.mamba_expand * model.hidden_size,
        model.mamba_d_state,
        model.mamba_dt_rank,
    )
    bias = model.mamba_use_bias_in_linears
    conv = inner * (model.mamba_d_conv + model.mamba_use_bias_in_conv)
    projections = 2 * inner * (h + bias) + (rank + 2 * n) * inner + inner * (rank + 1) + h * inner
    biases = bias * (h + (rank + 2 * n) * model.mamba_use_bias_in_x_proj)
    return Size(projections + conv + inner * (n + 1), biases)


def mamba2_size(model: ModelConfig) -> Size:
    h, inner = model.hidden_size, model.mamba_expand * model.hidden_size
    heads, bias = inner // model.mamba_head_dim, model.mamba_use_bias_in_linears
    channels = inner + 2 * model.mamba_n_groups * model.mamba_d_state
    conv = channels * (model.mamba_d_conv + model.mamba_use_bias_in_conv)
    projections = (inner + channels + heads) * (h + bias) + h * inner
    return Size(projections + conv + 3 * heads + inner, bias * h)


def mamba_flops(model: ModelConfig) -> float:
    """Per channel and number of state: decay, drive and readout, a multiply-add each (the scan); and the convolution.
    Three times that with the backward pass."""
    inner = model.mamba_expand * model.hidden_size
    return 18.0 * inner * model.mamba_d_state + 6.0 * inner * model.mamba_d_conv


def rwkv4_size(model: ModelConfig) -> Size:
    """Time and channel mixing."""
    h, a, f = model.hidden_size, model.dim_att, model.ffn_dim
    assert a is not None and f is not None  # derived
    return Size(4 * h * a + 2 * a + 2 * h * f + h * h, 5 * h)


def rwkv4_flops(model: ModelConfig) -> float:
    """Per channel a multiply-add each for numerator and denominator, of the state and of what is read, and a division;
    three times that with the backward pass."""
    assert model.dim_att is not None  # derived
    return 27.0 * model.dim_att


def rwkv6_size(model: ModelConfig) -> Size:
    """Time and channel mixing."""
    h, a, f = model.hidden_size, model.dim_att, model.ffn_dim
    assert a is not None and f is not None  # derived
    split = 5 * h * a + (4 + RWKV6_DECAY_RANK) * a + 2 * h * f + h * h
    return Size(split, (8 + 10 * RWKV6_MIX_RANK + RWKV6_DECAY_RANK) * h)


def rwkv6_flops(model: ModelConfig) -> float:
    """Per number of state: decay, drive and readout, a multiply-add each; three times that with the backward pass."""
    assert model.dim_att is not None and model.head_size is not None  # derived
    return 18.0 * model.dim_att * model.head_size


def gmlp_size(model: ModelConfig) -> Size:
    """Both projections and the gating unit."""
    h, f, longest = model.hidden_size, 4 * model.hidden_size, model.seq_length
    return Size(3 * f * h, longest * (longest + 1) + norm_parameters(model, f))


def gmlp_flops(model: ModelConfig) -> float:
    """The matrix over positions works on every channel; one product per parameter is counted already."""
    return 6.0 * model.seq_length * (4 * model.hidden_size - model.seq_length)


def amlp_size(model: ModelConfig) -> Size:
    f, d = 4 * model.hidden_size, model.gmlp_attn_dim
    return gmlp_size(model) + Size(6 * d * f + f * d + f, 3 * d)


def amlp_flops(model: ModelConfig) -> float:
    return gmlp_flops(model) + 12.0 * model.gmlp_attn_dim * model.seq_length


_ATTENTION = MixerCost(attention_size, attention_flops)
MIXER_COSTS: dict[str, MixerCost] = {
    **dict.fromkeys(ATTENTION, _ATTENTION),
    "mamba": MixerCost(mamba_size, mamba_flops),
    "mamba2": MixerCost(mamba2_size, mamba_flops),
    "rwkv4": MixerCost(rwkv4_size, rwkv4_flops),
    "rwkv": MixerCost(rwkv6_size, rwkv6_flops),
    "gmlp": MixerCost(gmlp_size, gmlp_flops),
    "amlp": MixerCost(amlp_size, amlp_flops),
}
MLP_SIZES: dict[str, Callable[[ModelConfig], Size]] = {
    "dense": dense_size,
    "moe": moe_size,
    "none": lambda model: Size(),
}


def block_size(model: ModelConfig, layer: int, vocab_size: int) -> Size:
    """Of block `layer` (from 0) of a derived model."""
    assert model.attention_config is not None and model.layer_mlps is not None  # derived
    kind, mlp = model.attention_config[layer], model.layer_mlps[layer]
    if kind in added(BLOCK):
        return added_size(BLOCK, kind, model, mlp)
    count = 2 + (layer == 0) if kind in RWKV else _norms(model, mlp)
    norms = Size(replicated=count * norm_parameters(model, model.hidden_size))
    values = value_embeddings_size(model, vocab_size) if has_value_embeddings(model, layer) else Size()
    return norms + _mixer_size(model, kind) + values + _mlp_size(model, mlp)


def has_value_embeddings(model: ModelConfig, layer: int) -> bool:
    """Every `value_embedding_interval`-th layer, counted from the last one, which is among them."""
    assert model.num_layers is not None  # derived
    every = model.value_embedding_interval
    return every > 0 and (model.num_layers - 1 - layer) % every == 0


def value_embeddings_size(model: ModelConfig, vocab_size: int) -> Size:
    """A row of the key/value heads' width for each token, of which a token uses its own, and the gates."""
    assert model.num_kv_heads is not None and model.head_dim is not None and model.hidden_size is not None  # derived
    width = model.num_kv_heads * model.head_dim
    gates = model.num_kv_heads * min(VALUE_GATE_CHANNELS, model.hidden_size)
    return Size(split=vocab_size * width + gates, idle=(vocab_size - 1) * width)


def _mixer_size(model: ModelConfig, kind: str) -> Size:
    return MIXER_COSTS[kind].size(model) if kind in MIXER_COSTS else added_size("attention_config", kind, model)


def _mlp_size(model: ModelConfig, mlp: str) -> Size:
    return MLP_SIZES[mlp](model) if mlp in MLP_SIZES else added_size("mlp_config", mlp, model)


def without_flops(model: ModelConfig) -> list[str]:
    """The kinds of mixer, of plugins, without a `flops` for what is not products with weights."""
    plugged = {**added(BLOCK), **added("attention_config")}
    return sorted(
        kind for kind in set(model.attention_config or ()) & set(plugged) if not hasattr(plugged[kind], "flops")
    )


def mixer_flops(model: ModelConfig, kind: str) -> float:
    """Training FLOPs per token that are not products with weights; 0 for a mixer of a plugin without `flops`."""
    if kind in MIXER_COSTS:
        return MIXER_COSTS[kind].flops(model)
    entry = {**added(BLOCK), **added("attention_config")}[kind]
    formula = getattr(entry, "flops", None)
    return 0.0 if formula is None else float(formula(model))


def _norms(model: ModelConfig, mlp: str) -> int:
    if mlp == "none" or (model.gpt_j_residual and model.gpt_j_tied):
        return 1
    return 4 if model.norm_placement == "sandwich" else 2
