"""The YAML next to an imported model: its architecture, its tokenizer, and modest settings for further training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron.neox_arguments.yaml_files import CONFIG_DIR

LONGEST = 4096  # a first seq_length for models whose positions reach much further
_NO_TOKENIZER = """\
# The model came without one: set tokenizer_type and vocab_file (HFTokenizer and its tokenizer.json, for example).
"""
_TRAINING = """\
# where training starts: these weights, at step 0. Set `save` to a folder of the new run's own.
load: {load}
finetune: true

# optimizer and length: modest settings, to be adapted to your data
optimizer:
  type: AdamW
  params:
    lr: 1.0e-5
    betas: [0.9, 0.95]
    eps: 1.0e-8
weight_decay: 0.1
gradient_clipping: 1.0
train_micro_batch_size_per_gpu: 1
train_iters: 1000
lr_decay_style: cosine
min_lr: 1.0e-6
warmup: 0.03
checkpoint_factor: 500
eval_interval: 500
eval_iters: 10
log_interval: 10

# data: set data_path, or the keys of a mixture, to token files made with this tokenizer
"""


def ready_config(
    keys: dict[str, Any],
    *,
    source: str,
    tool: str,
    tokenizer: dict[str, Any],
    tp: int,
    pp: int,
    precision: str,
    model_tokens: dict[str, Any] | None = None,
) -> str:
    """The text of a YAML file next to the checkpoint, with paths relative to itself.

    Args:
        keys: our keys of the architecture.
        source: the model's name at its origin; `tool`: what converted it.
        tokenizer: the keys of the tokenizer; empty when there is none.
        precision: `fp32`, `fp16` or `bfloat16`.
        model_tokens: the key of that name; None leaves it out.
    """
    head = f"# Made from {source} by {tool}.\n# ${{CONFIG_DIR}} is the folder of this file: it may be moved.\n"
    length = min(keys["max_position_embeddings"], LONGEST)
    names = _dump(tokenizer) if tokenizer else _NO_TOKENIZER
    if model_tokens is not None:
        names += _dump({"model_tokens": model_tokens})
    layout = {"pipe_parallel_size": pp, "model_parallel_size": tp}
    parts = [head, _dump(layout), "# network", _dump({**keys, "seq_length": length}), "# tokenizer", names]
    return "\n".join([*parts, _dump({"precision": precision}), _TRAINING.format(load=CONFIG_DIR)])


def tokenizer_keys(copied: Path, final: str) -> dict[str, str]:
    """`tokenizer_type` and `vocab_file` for the files in `copied`, a folder that will be `final`; {} without any."""
    whole = (copied / "tokenizer.json").is_file()
    if whole or all((copied / name).is_file() for name in ("vocab.json", "merges.txt")):
        return {"tokenizer_type": "HFTokenizer", "vocab_file": final}
    if (copied / "tokenizer.model").is_file():
        return {"tokenizer_type": "SPMTokenizer", "vocab_file": f"{final}/tokenizer.model"}
    if (copied / "tokenizer.tiktoken").is_file():
        return {"tokenizer_type": "TiktokenTokenizer", "vocab_file": f"{final}/tokenizer.tiktoken"}
    return {}


def _dump(keys: dict[str, Any]) -> str:
    lines = []
    for name, value in keys.items():
        # YAML 1.1 reads 1e-05 as a text; a point makes it a number for everybody.
        text = yaml.safe_dump(value, width=10**6, allow_unicode=True, default_flow_style=True)
        if isinstance(value, float):
            text = repr(value)
            if "e" in text and "." not in text:
                text = text.replace("e", ".0e")
        lines.append(f"{name}: {text.removesuffix('...' + chr(10)).strip()}")
    return "\n".join(lines) + "\n"
