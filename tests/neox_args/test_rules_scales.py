"""Caps, factors and biases: what is refused, and what they leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.formulas import parameter_count
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

MUP = {"use_mup": True, "mup_base_hidden_size": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: must be above 0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping: must be above 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be above 0"),
        ({"attn_logit_softcapping": 50.0, "attention_backend": "torch"}, "attention_backend: torch cannot cap scores"),
        ({"attn_logit_softcapping": 50.0, "attention_backend": "varlen"}, "varlen cannot cap scores"),
        ({"query_pre_attn_scalar": 64, **MUP}, "query_pre_attn_scalar: muP scales queries by 1 / head_dim"),
        ({"scale_embedding": True, **MUP}, "scale_embedding: .*mup_embedding_mult"),
        ({"embedding_dropout": 1.0}, r"embedding_dropout: must be in \[0, 1\)"),
        ({"rotary_emb_base_local": 1e4}, "rotary_emb_base_local: pos_emb is learned; .*rotary"),
        ({"rotary_emb_base_local": 1e4, "pos_emb": "rotary"}, "rotary_emb_base_local: .*no layer"),
        ({"rotary_emb_base_local": 0.0}, "rotary_emb_base_local: must be above 0"),
        ({"use_bias_in_head": True}, "use_bias_in_head: .*word embeddings"),
        (
            {"norm": "rmsnorm_unit_offset", "use_qk_layernorm": True, "use_separate_qk_norms": True},
            "needs qk_norm_per_head: true",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        derived(tmp_path, **changes)


def test_what_is_allowed(tmp_path: Path) -> None:
    model = derived(
        tmp_path,
        attn_logit_softcapping=50,
        final_logit_softcapping=30,
        attention_backend="manual",
        pos_emb="rotary",
        sliding_window_width=8,
        rotary_emb_base_local=10000,
        norm="rmsnorm_unit_offset",
        use_separate_qk_norms=True,
        qk_norm_per_head=True,
        norm_placement="sandwich",
        **MUP,
    ).model
    assert (model.attn_logit_softcapping, model.final_logit_softcapping) == (50.0, 30.0)
    assert model.rotary_emb_base_local == 10000.0


def test_a_bias_of_the_head_is_counted_over_the_real_vocabulary(tmp_path: Path) -> None:
    with_bias, without = (
        parameter_count(derived(tmp_path, no_weight_tying=True, use_bias_in_head=bias).model, 1001)
        for bias in (True, False)
    )
    assert with_bias.head - without.head == with_bias.total - without.total == 1001
