"""What `intermediate_size` means with a gated activation, where the config does not say (gated_width_rule)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts
from megatron.neox_arguments.formulas import parameter_count
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

LLAMA = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "pos_emb": "rotary",
    "rotary_pct": 1,
    "no_weight_tying": True,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "seq_length": 2048,
}
# As the files of GPT-NeoX ("of a third") and of its SLURM fork ("final") write them: layers, hidden_size, heads and
# key/value heads, intermediate_size, mlp_multiple_of, vocabulary; then the width and the parameters of the published
# model (from its paper or config.json, and the sum over the shapes of its files).
PUBLISHED = {
    "LLaMA 7B, a third": (32, 4096, 32, 32, 32768, 256, 32000, 11008, 6_738_415_616),
    "LLaMA 13B, a third": (40, 5120, 40, 40, 40960, 256, 32000, 13824, 13_015_864_320),
    "LLaMA 30B, a third": (60, 6656, 52, 52, 53248, 256, 32000, 17920, 32_528_943_616),
    "LLaMA 65B, a third": (80, 8192, 64, 64, 65536, 256, 32000, 22016, 65_285_660_672),
    "Llama 2 13B, a third": (40, 5120, 40, 40, 41472, 256, 32000, 13824, 13_015_864_320),
    "Llama 2 70B, a third": (80, 8192, 64, 8, 86016, 256, 32000, 28672, 68_976_648_192),
    "Llama 2 13B, final": (40, 5120, 40, 40, 13824, 13824, 32000, 13824, 13_015_864_320),
    "Llama 3 8B, final": (32, 4096, 32, 8, 14336, 14336, 128256, 14336, 8_030_261_248),
    "Mistral 7B, final": (32, 4096, 32, 8, 14336, 1, 32000, 14336, 7_241_732_096),
    "Qwen 2.5 72B without its biases, final": (80, 8192, 64, 8, 29568, 1, 152064, 29568, 72_705_384_448),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_models_have_their_size(case: str, tmp_path: Path) -> None:
    layers, hidden, heads, kv, size, multiple, vocab, width, parameters = PUBLISHED[case]
    keys = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_kv_heads": kv}
    args = derived(
        tmp_path, facts=Facts(vocab_size=vocab), **LLAMA, **keys, intermediate_size=size, mlp_multiple_of=multiple
    )
    assert args.model.ffn_width == width
    assert parameter_count(args.model, vocab).total == parameters
    if multiple == size:  # then both readings are the same width
        assert not args.notes
        return
    (note,) = args.notes
    rule = "final" if size == width else "two_thirds"
    assert f"intermediate_size {size}" in note and str(width) in note and f"gated_width_rule: {rule}" in note
    assert args.model.gated_width_rule == rule


def test_olmo_3_7b_has_its_size(tmp_path: Path) -> None:
    keys = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    norms = {"norm_placement": "olmo3", "use_qk_layernorm": True, "use_separate_qk_norms": True}
    args = derived(tmp_path, facts=Facts(vocab_size=100278), **{**LLAMA, **keys, **norms})
    assert args.model.ffn_width == 11008
    assert parameter_count(args.model, 100278).total == 7_298_011_136


@pytest.mark.parametrize(
    ("size", "more", "width"),
    [
        (64 * 6, {}, 64 * 6),  # Qwen2.5 and OLMo 2 32B have 5.4 to 5.9
        (456, {}, None),  # 7.1: neither as others have it, nor a third of it (2.4 x 64 is 153.6)
        (400, {}, None),
        (480, {}, 160),
        (512, {}, 170),
        (512, {"activation": "geglu"}, None),  # Gemma's final width is 8 x hidden_size
        (512, {"activation": "geglu", "gated_width_rule": "final"}, 512),
        (512, {"activation": "gelu"}, 512),
        (400, {"gated_width_rule": "two_thirds"}, 133),
        (512, {"moe_num_experts": 4}, 512),  # experts have it as it is, in GPT-NeoX too
    ],
)
def test_the_ratio_decides_where_it_is_clear(
    size: int, more: dict[str, Any], width: int | None, tmp_path: Path
) -> None:
    keys = {"activation": "swiglu", "intermediate_size": size, **more}
    if width is None:
        with pytest.raises(UserError, match=rf"a\.yml:\d+: intermediate_size: {size} .*gated_width_rule") as caught:
            derived(tmp_path, **keys)
        for number in (size, size * 2 // 3 // 2, 64):
            assert f" {number} " in str(caught.value)
    else:
        assert derived(tmp_path, **keys).model.ffn_width == width


def test_without_intermediate_size_llamas_width_is_named(tmp_path: Path) -> None:
    args = derived(tmp_path, activation="swiglu", mlp_multiple_of=8)
    (note,) = args.notes
    assert args.model.ffn_width == 88 and " 88." in note and "intermediate_size: 176" in note
    quiet: tuple[dict[str, Any], ...] = (
        {"expansion_factor": 4},
        {"gated_width_rule": "two_thirds"},
        {"activation": "gelu"},
    )
    for keys in quiet:
        assert not derived(tmp_path, **{"activation": "swiglu", **keys}).notes
