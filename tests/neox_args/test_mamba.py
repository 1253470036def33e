"""Rules of Mamba layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.formulas import parameter_count
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

CONFIGS = Path(__file__).parents[2] / "configs"
MAMBA: dict[str, Any] = {"attention_config": [[["mamba"], "all"]]}
MAMBA2: dict[str, Any] = {"attention_config": [[["mamba2"], "all"]]}
MIXED: dict[str, Any] = {"attention_config": ["mamba", "global", "mamba2", "global"], "mamba_d_state": 16}


def test_widths_are_resolved(tmp_path: Path) -> None:
    model = derived(tmp_path, **MAMBA, hidden_size=72, num_attention_heads=None).model
    assert (model.mamba_d_state, model.mamba_dt_rank) == (16, 5)  # 72 / 16, rounded up
    assert (model.num_attention_heads, model.layer_mlps) == (1, ("none",) * 4)
    assert derived(tmp_path, **MAMBA2).model.mamba_d_state == 128
    assert derived(tmp_path, **MIXED).model.layer_mlps == ("none", "dense", "none", "dense")
    assert derived(tmp_path).model.mamba_d_state is None


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 7}, {"num_attention_heads": 7, "num_kv_heads": 3}])
def test_heads_say_nothing_without_attention(tmp_path: Path, changes: dict[str, Any]) -> None:
    """GPT-NeoX asks for them; they need not divide anything."""
    model = derived(tmp_path, **{"num_attention_heads": None, **MAMBA, "model_parallel_size": 2, **changes}).model
    assert model.num_attention_heads == changes.get("num_attention_heads", 1)
    with pytest.raises(UserError, match="num_attention_heads"):
        derived(tmp_path, **{"num_attention_heads": None, **MIXED, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**MIXED, "mamba_d_state": None}, "mamba_d_state: .*set .*both"),
        ({**MAMBA, "mamba_d_state": 0}, "mamba_d_state: must be above 0"),
        ({**MAMBA, "mamba_dt_min": 0.2}, "mamba_dt_min: 0.2 is above mamba_dt_max 0.1"),
        ({**MAMBA, "mamba_inner_func_fusion": True, "mamba_use_bias_in_linears": True}, "inner_func_fusion: .*bias"),
        ({**MAMBA, "hidden_size": 51, "num_attention_heads": 3, "model_parallel_size": 4}, "cannot be split over 4"),
        ({**MAMBA2, "mamba_head_dim": 48}, r"\b48 .*mamba_expand x hidden_size = 128; .*96 or 144"),
        ({**MAMBA2, "mamba_n_groups": 3, "mamba_head_dim": 32}, r"\b3 .*\b4 heads .*mamba2"),
        ({**MAMBA2, "model_parallel_size": 4}, r"\b2 heads .*mamba2 .*\b4 ranks"),
        ({**MAMBA, "use_mup": True, "mup_base_hidden_size": 32}, "use_mup: .*Mamba"),
        ({"attention_config": ["mambo"] * 4}, "'mambo'.*'mamba'"),
    ],
)
def test_mistakes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        derived(tmp_path, **changes)
    assert re.search(message, str(error.value))


# Parameters of the published models (state-spaces' checkpoints; the embedding counted once).
PUBLISHED = {
    "mamba/mamba-130M": (50280, 129_135_360),
    "mamba/mamba-370M": (50280, 371_516_416),
    "mamba/mamba-790M": (50280, 793_204_224),
    "mamba/mamba-1.4B": (50280, 1_372_178_432),
    "mamba/mamba-2.8B": (50280, 2_768_345_600),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    from megatron.neox_arguments.derive import derive

    vocab, total = PUBLISHED[name]
    model = derive(NeoXArgs.from_files([name], conf_dir=str(CONFIGS)), Facts(vocab_size=vocab)).model
    assert parameter_count(model, vocab).total == total
