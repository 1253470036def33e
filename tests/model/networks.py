"""Tiny networks for the tests of layers, model and objectives.

TINY: 2 layers, hidden 32, 4 heads over 2 key/value heads, vocabulary 67, sequence 16, fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.gpt import gpt_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu.random import stable_seed
from megatron.mpu.sharding import named_parameters, shard, zeros
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.objectives import OBJECTIVES

VOCAB = 67
SEED = 1234
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "pos_emb": "rotary",
    "train_micro_batch_size_per_gpu": 2,
}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "activation": "swiglu",
    "intermediate_size": 48,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "no_weight_tying": True,
}
NEOX: dict[str, Any] = {
    "rotary_pct": 0.25,
    "gpt_j_residual": True,
    "no_weight_tying": True,
}
GEMMA2: dict[str, Any] = {
    **LLAMA,
    "norm": "rmsnorm_unit_offset",
    "norm_placement": "sandwich",
    "activation": "geglu_tanh",
    "head_dim": 12,
    "scale_embedding": True,
    "no_weight_tying": False,
    "query_pre_attn_scalar": 5,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 1.0,
}
GEMMA3: dict[str, Any] = {
    **{key: value for key, value in GEMMA2.items() if not key.endswith("softcapping")},
    "use_separate_qk_norms": True,
    "qk_norm_per_head": True,
    "sliding_window_width": 4,
    "attention_config": [[["local", "global"], "all"]],
    "rotary_emb_base_local": 70.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
PHI: dict[str, Any] = {**NEOX, "gpt_j_tied": True, "rotary_pct": 0.5, "use_bias_in_head": True}


def tiny(**changes: Any) -> ModelConfig:
    """The derived model config of TINY with changes."""
    return derive(NeoXArgs.from_saved({**TINY, **changes})).model


def padded(multiple: int) -> int:
    """The vocabulary padded to a multiple."""
    return -(-VOCAB // multiple) * multiple


def build(model: ModelConfig, state: ParallelState | None = None, *, padding: int = 128) -> SequentialModel:
    """The network with its initial weights, except that biases and norm weights are random too, so that no symmetry
    hides a fault. Values depend on names and full shapes only."""
    state = state or ParallelState.single()
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=padded(padding), state=state)
    network = SequentialModel(layers, OBJECTIVES["normal"](), SEED, state)
    randomise_vectors(network, state)
    return network


@torch.no_grad()
def randomise_vectors(network: nn.Module, state: ParallelState) -> None:
    """Add noise to every bias and norm weight, and to matrices that start at zero."""
    for name, parameter in named_parameters(network):
        if parameter.spec.kind == "vector" or parameter.spec.init is zeros:
            noise = torch.empty(parameter.spec.shape)
            noise.normal_(0, 0.3, generator=torch.Generator().manual_seed(stable_seed("noise", name)))
            parameter += shard(noise, parameter.spec, state.tp_rank, state.tp_size).to(parameter)


def batch(rows: int = 2, length: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, positions, targets), each [rows, length] int64."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (rows, length + 1), generator=generator)
    return text[:, :-1], torch.arange(length).expand(rows, length).contiguous(), text[:, 1:].contiguous()


def logits(network: SequentialModel, tokens: Tensor, positions: Tensor, *doc_ids: Tensor) -> Tensor:
    """[b, s, v] fp32."""
    return network((tokens, positions, *doc_ids), then=lambda out: out.logits())
