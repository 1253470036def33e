"""Which of a block's norms a file may hold without their being used."""

from __future__ import annotations

import pytest

from megatron.checkpoint.neox_names import sources

pytestmark = pytest.mark.cpu

BEHIND = {"post_attention_layernorm.scale", "post_feedforward_layernorm.scale"}
AROUND = {"input_layernorm.scale", "pre_feedforward_layernorm.scale", *BEHIND}


def test_the_first_norm_is_unused_only_where_all_norms_stand_behind() -> None:
    """OLMo's blocks in the fork of GPT-NeoX own it; in blocks with norms on both sides it is one of the four."""
    for wanted, stored in ((BEHIND, BEHIND | {"input_layernorm.scale"}), (AROUND, AROUND)):
        found, left_over = sources(sorted(stored), wanted)
        assert found.keys() == wanted and not left_over
