"""Token files without text, and a character-level config, for dry runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.builder import IndexedDatasetBuilder


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tokens(documents, length)` -> prefix of a data set of that many documents of that many tokens below 200."""
    folder = tmp_path_factory.mktemp("tokens")

    def make(documents: int, length: int) -> str:
        prefix = folder / f"d{documents}x{length}"
        if not prefix.with_suffix(".idx").exists():
            with IndexedDatasetBuilder(prefix, np.uint16) as builder:
                for _ in range(documents):
                    builder.add_document(np.arange(length) % 200)
                builder.finalize()
        return str(prefix)

    return make


@pytest.fixture
def run_config(tmp_path: Path, tokens: Callable[..., str]) -> Path:
    """A small complete training config."""
    path = tmp_path / "run.yml"
    path.write_text(f"""\
num_layers: 6
hidden_size: 32
num_attention_heads: 4
seq_length: 16
pos_emb: rotary
train_batch_size: 16
train_micro_batch_size_per_gpu: 2
train_iters: 100
eval_interval: 50
eval_iters: 2
tokenizer_type: CharLevelTokenizer
data_path: {tokens(100, 200)}
split: "8,1,1"
""")
    return path
