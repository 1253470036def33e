"""The torch-free formulas against the parameters of networks that are really built."""

from __future__ import annotations

import pytest

from megatron.neox_arguments.formulas import parameter_count
from tests.model.networks import LLAMA, NEOX, VOCAB, build, tiny

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NEOX,
        LLAMA,
        {**NEOX, "gpt_j_tied": True},
        {"pos_emb": "learned", "max_position_embeddings": 24},
        {"pos_emb": "learned", "opt_pos_emb_offset": 2, "max_position_embeddings": 20},
        {"norm": "scalenorm", "pos_emb": "alibi"},
        {"pos_emb": "rpe", "rpe_num_buckets": 6},
        {"norm": "non_parametric_layernorm", "pos_emb": "sinusoidal"},
        {"use_qk_layernorm": True},
        {"use_qk_layernorm": True, "use_separate_qk_norms": True, "norm": "rmsnorm", "norm_placement": "olmo3"},
        {"activation": "geglu", "mlp_multiple_of": 16, "num_kv_heads": 1},
        {"norm": "rmsnorm_unit_offset", "norm_placement": "sandwich", "activation": "geglu_tanh", "head_dim": 16},
        {**LLAMA, "norm": "rmsnorm_unit_offset", "use_separate_qk_norms": True, "qk_norm_per_head": True},
        {**NEOX, "gpt_j_tied": True, "use_bias_in_head": True},
        {**LLAMA, "value_embedding_interval": 2, "num_layers": 3},
        {"use_bias_in_mlp": False, "use_bias_in_attn_linear": False, "no_weight_tying": True},
    ],
)
def test_parameter_count(changes: dict) -> None:
    model = tiny(**changes)
    network = build(model, padding=VOCAB)
    counted = sum(parameter.numel() for parameter in {id(p): p for p in network.parameters()}.values())
    assert parameter_count(model, VOCAB).total == counted
