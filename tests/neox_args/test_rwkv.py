"""Rules of RWKV layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

RWKV4: dict[str, Any] = {"attention_config": [[["rwkv4"], "all"]]}
RWKV6: dict[str, Any] = {"attention_config": [[["rwkv"], "all"]]}
BOTH: dict[str, Any] = {"attention_config": ["rwkv4", "rwkv", "global", "rwkv"]}


def test_widths_are_resolved(tmp_path: Path) -> None:
    """GPT-NeoX asks for dim_att, and RWKV-6 is 3.5 times as wide inside, rounded down to a multiple of 32."""
    model = derived(tmp_path, **RWKV4, hidden_size=72, num_attention_heads=None).model
    assert (model.dim_att, model.ffn_dim, model.head_size, model.num_attention_heads) == (72, 288, None, 1)
    model = derived(tmp_path, **RWKV6, hidden_size=192, num_attention_heads=None).model
    assert (model.dim_att, model.ffn_dim, model.head_size) == (192, 672, 64)
    assert derived(tmp_path, **BOTH, ffn_dim=96).model.layer_mlps == ("none", "none", "dense", "none")
    assert derived(tmp_path).model.dim_att is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**BOTH}, "ffn_dim: .*set .*rwkv4 and rwkv"),
        ({**RWKV4, "dim_att": 0}, "dim_att: must be above 0"),
        ({**RWKV4, "dim_att": 50, "model_parallel_size": 4}, "dim_att: 50 cannot be split over 4"),
        ({**RWKV4, "ffn_dim": 50, "model_parallel_size": 4}, "ffn_dim: 50 cannot be split over 4"),
        ({**RWKV6, "head_size": 48}, "head_size: 48 .*dim_att 64; .*48 or 96"),
        ({**RWKV6, "head_size": 32, "model_parallel_size": 4}, r"\b2 heads .*rwkv .*\b4 ranks"),
        ({**RWKV4, "use_mup": True, "mup_base_hidden_size": 32}, "use_mup: .*RWKV"),
        ({"attention_config": ["rwvk4"] * 4}, "'rwvk4'.*'rwkv4'"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        derived(tmp_path, **changes)
    assert re.search(message, str(error.value))
