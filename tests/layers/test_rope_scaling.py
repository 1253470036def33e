"""Scaled rotary frequencies against transformers' own, and configurations that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron.errors import UserError
from megatron.layers.positions.rope_scaling import frequencies
from megatron.layers.positions.rotary import Rotary
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES = [
    {},
    LLAMA_3_1,
    {**LLAMA_3_1, "factor": 32.0, "low_freq_factor": 2.0},
    LINEAR,
    {"rope_type": "dynamic", "factor": 4.0},
    YARN,
    # OLMo 3's, with its own magnitude; then every number in another place
    {**YARN, "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836},
    {**YARN, "beta_fast": 16, "beta_slow": 2.5, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "mscale": 0.7},
    {**YARN, "factor": 0.5},
    {**YARN, "original_max_position_embeddings": 8},  # the ramp begins before the first pair
]


@pytest.mark.parametrize("base", [500000.0, 10000.5])
@pytest.mark.parametrize("scaling", CASES)
def test_tables_are_those_of_transformers(scaling: dict[str, Any], base: float) -> None:
    """Frequencies and magnitude; head size 128."""
    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": base},
    )
    theirs = LlamaRotaryEmbedding(config)
    plain, ours = frequencies(128, base), frequencies(128, base, scaling)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6 if "low_freq_factor" in scaling else 0, atol=0)
    if scaling.get("rope_type") in ("llama3", "yarn") and scaling["original_max_position_embeddings"] > 8:
        kinds = (ours == plain, (ours / (plain / scaling["factor"]) - 1).abs() < 1e-6)
        assert kinds[0].any() and kinds[1].any() and not (kinds[0] | kinds[1]).all()
    positions = torch.tensor([[0, 1, 7, 95]])
    cos, sin = theirs(torch.zeros(1), positions)
    rotary = Rotary(128, base, 96, torch.device("cpu"), scaling)
    for mine, other in ((rotary.cos, cos), (rotary.sin, sin)):
        torch.testing.assert_close(mine[positions], other[..., :64], rtol=1e-5, atol=1e-6)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(4)],
    "long_factor": [2.0 + i for i in range(4)],
    "original_max_position_embeddings": 6,
}


@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"attention_factor": 1.5}, {"factor": 0.5}])
def test_long_texts_are_rotated_as_transformers_does(more: dict[str, Any]) -> None:
    """Texts of 5, 6, 7 and 12 tokens by themselves; packed, each as by itself; token by token, by the length so far."""
    scaling = {**LONGROPE, **more}
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=2,
        max_position_embeddings=24,
        rope_parameters={**scaling, "rope_theta": 100.0},
    )
    theirs, rotary = LlamaRotaryEmbedding(config), Rotary(8, 100.0, 24, torch.device("cpu"), scaling)
    lengths = [5, 6, 7, 12]
    x = torch.randn(1, sum(lengths), 3, 8)
    packed = rotary(x, torch.cat([torch.arange(length) for length in lengths])[None])
    for length, part, whole in zip(lengths, x.split(lengths, 1), packed.split(lengths, 1), strict=True):
        positions = torch.arange(length)[None]
        cos, sin = theirs(x, positions)
        wanted = apply_rotary_pos_emb(part, part, cos, sin, unsqueeze_dim=2)[0]
        torch.testing.assert_close(rotary(part, positions), wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(rotary(part, positions), whole)
        torch.testing.assert_close(rotary(part[:, -1:], positions[:, -1:]), wanted[:, -1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2.0}, "rope_type None .*linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "proportional", "factor": 2.0}, "'proportional'"),
        ({"rope_type": "longrope", "factor": 2.0}, "longrope lacks long_factor, original_max_position"),
        ({**LONGROPE, "short_factor": [1.0] * 3}, "short_factor has 3 numbers; a head has"),
        ({**LONGROPE, "long_factor": [1.0, -1.0]}, "long_factor .*positive"),
        ({"rope_type": "linear"}, "linear lacks factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "yarn lacks original_max_position_embeddings"),
        ({**YARN, "truncate": 1}, "truncate .*true or false"),
        ({**YARN, "beta_fast": True}, "beta_fast must be positive"),
        ({**LINEAR, "factor": 0}, "factor must be positive"),
        ({**LINEAR, "facto": 1.0}, r"linear .*\bfacto; .*factor"),
        ({**LLAMA_3_1, "low_freq_factor": 4.0}, "low_freq_factor must be below high_freq_factor"),
    ],
)
def test_scalings_that_make_no_sense_are_refused(tmp_path: Path, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        derived(tmp_path, pos_emb="rotary", rope_scaling=scaling)


def test_the_base_need_not_be_whole(tmp_path: Path) -> None:
    assert derived(tmp_path, pos_emb="rotary", rotary_emb_base=10000.5).model.rotary_emb_base == 10000.5
    assert derived(tmp_path, pos_emb="rotary", rotary_emb_base=500000).model.rotary_emb_base == 500000


def test_only_rotary_positions_are_scaled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rope_scaling: pos_emb is learned; .*rotary"):
        derived(tmp_path, pos_emb="learned", rope_scaling=LINEAR)
    assert derived(tmp_path, pos_emb="rotary", rope_scaling=LINEAR).model.rope_scaling == LINEAR
