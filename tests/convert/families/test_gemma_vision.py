"""The text model inside Gemma 3 with a vision tower: refused as it is, converted by the recipe of the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from megatron.convert.hf.import_hf import import_model
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

GUIDE = Path(__file__).parents[3] / "documentation/conversion.md"
TEXT = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def test_the_recipe_of_the_guide(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    both = Gemma3ForConditionalGeneration(config)
    both.save_pretrained(tmp_path / "gemma-3-4b-pt")
    with pytest.raises(UserError, match="vision tower.*documentation/conversion.md"):
        import_model(str(tmp_path / "gemma-3-4b-pt"), tmp_path / "refused")
    (recipe,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    lines = [line for line in recipe.splitlines() if not line.startswith("AutoTokenizer")]
    monkeypatch.chdir(tmp_path)
    exec("\n".join(lines).replace("google/", ""), {})
    done = import_model(str(tmp_path / "gemma-3-4b-text"), tmp_path / "out", tp=2)
    assert done.largest_difference < 1e-5
