"""Tiny models with the tokenizers of published chat models, whose greedy texts follow tokens that a test gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import AutoTokenizer as Tokenizers

from tests.tokenizer.published import MODELS, published

POSITIONS = 64
_SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": POSITIONS, "tie_word_embeddings": False,
}  # fmt: skip
# gpt-oss itself is no family here; its tokenizer and ids are what matters.
_KINDS = {"qwen3": "qwen3", "llama3.1": "llama", "gemma3": "gemma3_text", "gpt-oss": "llama"}


def chat_model(folder: Path, name: str, path: Sequence[int], *, generation: bool = True) -> PreTrainedModel:
    """Write the Hugging Face folder of a model of `MODELS`, and return it: after each token of `path` comes the next.

    After the last one comes the second, so that only an end ends a text. `generation`: with generation_config.json.
    """
    source = published(name)
    size = len(Tokenizers.from_pretrained(source))
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **MODELS[name].config}
    config = AutoConfig.for_model(_KINDS[name], vocab_size=size, **_SIZES, **ids)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    assert len(path) == len(set(path)) <= _SIZES["hidden_size"]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)  # so small that the last token decides
        axes, head = torch.eye(_SIZES["hidden_size"]), model.get_output_embeddings().weight
        for axis, token, following in zip(axes, path, [*path[1:], path[1]], strict=False):
            model.get_input_embeddings().weight[token] = 4 * axis
            head[following] += 3 * axis
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / file, folder / file)
    # As published: transformers writes what its classes make of it.
    stored = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if not k.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps({**stored, **MODELS[name].config}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(MODELS[name].generation))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
