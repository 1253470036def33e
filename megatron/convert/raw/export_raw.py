"""A checkpoint → LLaMA's or Mistral's own files, for as many model-parallel ranks as wanted: streamed and checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tensor_file import TensorFileWriter
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.convert.drafts import check_free, draft_of, publish
from megatron.convert.outputs import checkpoint_outputs, compare_outputs, random_tokens
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.convert.precision import cast, dtype_of
from megatron.convert.raw.files import EMBEDDING, HEAD, PARAMS, TOKENIZER_MODEL, RawFolder, shard_file, split_dim, table
from megatron.convert.raw.formulas import raw_outputs
from megatron.convert.raw.params import keys_of, params_of, unsupported
from megatron.convert.settings import Settings, open_source
from megatron.convert.tokenizer_files import open_tokenizer
from megatron.errors import UserError
from megatron.log import get_logger, progress
from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)

LLAMA3_BASE = 500_000  # from this rotary base on it is a Llama 3, whose embedding is split by rows


@dataclass(frozen=True)
class RawExported:
    """The folder that was made, and the largest difference of any logit in fp32 (None: not checked)."""

    folder: Path
    largest_difference: float | None


def export_raw(
    checkpoint: str | Path,
    output: str | Path,
    *,
    shards: int = 1,
    config_files: Sequence[str] = (),
    iteration: int | None = None,
    precision: str = "auto",
    check: bool = True,
    overwrite: bool = False,
) -> RawExported:
    """Convert a checkpoint to params.json and `shards` files consolidated.XX.pth.

    Raises `UserError` naming what these files cannot express, does not divide or differs; then nothing is left behind.
    """
    if shards < 1:
        raise UserError(f"--num_output_shards: {shards} files cannot hold a model")
    output = Path(output)
    check_free(output, PARAMS, overwrite)
    reader, settings = open_source(checkpoint, config_files, iteration=iteration)
    model, vocab_size = settings.model, reader.entry(WORD_EMBEDDINGS).shape[0]
    reasons = unsupported(model, shards)
    by_rows = model.rotary_emb_base >= LLAMA3_BASE
    if vocab_size % shards or (model.hidden_size % shards and not by_rows):
        reasons.append(f"{vocab_size} tokens of {model.hidden_size} numbers, which {shards} files do not divide")
    if reasons:
        raise UserError(f"raw LLaMA files cannot express this model: {'; '.join(reasons)}")
    dtype = dtype_of(precision, reader.dtype(WORD_EMBEDDINGS))
    with draft_of(output, "--output_dir") as draft:
        (draft / PARAMS).write_text(json.dumps(params_of(model, vocab_size)) + "\n", encoding="utf-8")
        _write_weights(draft, reader, model, shards, dtype, 0 if by_rows else 1)
        _copy_tokenizer(reader, settings, draft)
        difference = _check(draft, reader, model, dtype) if check else None
        publish(draft, output)
    return RawExported(output, difference)


def _write_weights(
    draft: Path, reader: CheckpointReader, model: ModelConfig, shards: int, dtype: torch.dtype, embedding_dim: int
) -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(TensorFileWriter(draft / shard_file(rank))) for rank in range(shards)]
        for rule in progress(table(model), what="exporting", unit="parameters"):
            for name, tensor in zip(rule.theirs, rule.transform.export(reader.weight(rule.ours)), strict=True):
                _add(files, name, cast(tensor, dtype, name), embedding_dim)
        if not model.no_weight_tying:
            _add(files, HEAD, cast(reader.weight(WORD_EMBEDDINGS), dtype, EMBEDDING), embedding_dim)


def _add(files: list[TensorFileWriter], name: str, tensor: Tensor, embedding_dim: int) -> None:
    dim = split_dim(name, embedding_dim)
    parts = [tensor] * len(files) if dim is None else tensor.chunk(len(files), dim)
    for file, part in zip(files, parts, strict=True):
        file.add(name, part)


def _copy_tokenizer(reader: CheckpointReader, settings: Settings, draft: Path) -> None:
    """The tokenizer as `tokenizer.model`, if it is of a kind that such a file holds."""
    vocab = Path(settings.vocab_file or "")
    file = vocab / TOKENIZER_MODEL if vocab.is_dir() else vocab
    if file.is_file() and (
        file.name == TOKENIZER_MODEL or settings.tokenizer_type in ("SPMTokenizer", "TiktokenTokenizer")
    ):
        opened = open_tokenizer(settings.tokenizer_type, settings.vocab_file, settings.merge_file)
        check_tokenizer(reader.checkpoint, opened, way_out="give --config_file with its vocab_file")
        shutil.copyfile(file, draft / TOKENIZER_MODEL)
    else:
        logger.warning(f"no {TOKENIZER_MODEL}: the tokenizer of the checkpoint is not sentencepiece's or tiktoken's")


def _check(draft: Path, reader: CheckpointReader, model: ModelConfig, dtype: torch.dtype) -> float:
    raw = RawFolder(draft)
    keys = keys_of(raw, "", model.max_position_embeddings)
    tokens = random_tokens(keys["vocab_size"], model.max_position_embeddings, model.layer_windows or ())
    found = compare_outputs(
        checkpoint_outputs(reader, model, tokens, dtype), raw_outputs(raw, keys, tokens, torch.float32)
    )
    return found.accept("the exported copy")
