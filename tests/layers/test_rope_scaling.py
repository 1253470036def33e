"""Scaled rotary frequencies against transformers' own, and configurations that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.errors import UserError
from megatron.layers.positions import scaled_frequencies
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


@pytest.mark.parametrize("scaling", [LLAMA_3_1, {**LLAMA_3_1, "factor": 32.0, "low_freq_factor": 2.0}, LINEAR])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": 500000.0},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    ours = scaled_frequencies(plain, scaling)
    assert factor == 1.0
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=0)
    kinds = (ours == plain, ours == plain / scaling["factor"])
    if scaling["rope_type"] == "llama3":
        assert kinds[0].any() and kinds[1].any() and not (kinds[0] | kinds[1]).all()
    assert torch.equal(scaled_frequencies(plain, {}), plain)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 2.0}, "rope_type None is not available; use linear or llama3"),
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn'"),
        ({"rope_type": "linear"}, "mend factor"),
        ({**LINEAR, "factor": 0}, "factor must be positive"),
        ({**LINEAR, "facto": 1.0}, "mend facto"),
        ({**LLAMA_3_1, "low_freq_factor": 4.0}, "low_freq_factor must be below high_freq_factor"),
    ],
)
def test_scalings_that_make_no_sense_are_refused(tmp_path: Path, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        derived(tmp_path, pos_emb="rotary", rope_scaling=scaling)


def test_only_rotary_positions_are_scaled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pos_emb is learned; it needs rotary"):
        derived(tmp_path, pos_emb="learned", rope_scaling=LINEAR)
    assert derived(tmp_path, pos_emb="rotary", rope_scaling=LINEAR).model.rope_scaling == LINEAR
