"""Do two copies of a model compute the same?

Both run in fp32 on random tokens, layer by layer, so that one layer of each is in memory whatever the size. When the
logits differ, the result names the first part of the network whose output differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.hf.streamed import folder_outputs
from megatron.convert.outputs import Difference, checkpoint_outputs, compare_outputs, random_tokens
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.convert.settings import open_source
from megatron.errors import UserError
from megatron.neox_arguments.schema_model import ModelConfig


def compare(
    reader: CheckpointReader,
    model: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    tokens: Tensor | None = None,
    rounded: bool = False,
) -> Difference:
    """Compare a checkpoint with a Hugging Face folder. Raises `UserError` when weights are missing or left over there.

    `dtype`: that of the folder's copy. `rounded`: `folder` is the source and may be stored in a wider type than
    `dtype`; its weights are rounded too.
    """
    if tokens is None:
        vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
        tokens = random_tokens(vocab_size, model.max_position_embeddings, model.layer_windows or ())
    theirs = folder_outputs(HuggingFaceFolder(folder), tokens, dtype if rounded else None)
    return compare_outputs(checkpoint_outputs(reader, model, tokens, dtype), theirs)


def check_pair(checkpoint: str | Path, folder: str | Path, config_files: Sequence[str] = ()) -> Difference:
    """Compare a checkpoint with a Hugging Face folder that should hold the same model, whoever made it.

    Raises `UserError` when there is no such pair: no folder, another vocabulary, weights missing or left over.
    """
    reader, settings = open_source(checkpoint, config_files)
    source = HuggingFaceFolder(Path(folder))
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    if source.config.get("vocab_size") != vocab_size:
        raise UserError(
            f"{folder} has vocab_size {source.config.get('vocab_size')}, {reader.folder} has {vocab_size} tokens"
        )
    name = source.config.get("dtype") or source.config.get("torch_dtype") or "float32"
    return compare(reader, settings.model, Path(folder), getattr(torch, name))
