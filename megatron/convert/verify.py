"""Do two models of any kind compute the same? The comparison that ends a conversion, for any pair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.convert.hf.streamed import folder_outputs, folder_tokens
from megatron.convert.outputs import Difference, checkpoint_outputs, compare_outputs, random_tokens
from megatron.convert.pairs import Place, open_pair, reference_of
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.convert.ready_config import tokenizer_keys
from megatron.convert.settings import Reference, open_source
from megatron.errors import UserError
from megatron.log import progress
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.tokenizer.build import create_tokenizer


@dataclass(frozen=True)
class _Ours:
    """A checkpoint, which our network runs."""

    reader: CheckpointReader
    model: ModelConfig

    @property
    def vocab_size(self) -> int:
        return self.reader.entry(WORD_EMBEDDINGS).shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.reader.dtype(WORD_EMBEDDINGS)

    def tokens(self) -> Tensor:
        return random_tokens(self.vocab_size, self.model.max_position_embeddings, self.model.layer_windows or ())

    def outputs(self, tokens: Tensor, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
        return checkpoint_outputs(self.reader, self.model, tokens, dtype)


@dataclass(frozen=True)
class _Theirs:
    """A Hugging Face folder, which transformers runs."""

    folder: HuggingFaceFolder

    @property
    def vocab_size(self) -> int:
        return self.folder.config.get("vocab_size", 0)

    @property
    def dtype(self) -> torch.dtype:
        kinds = {stored.dtype for stored in self.folder.tensors.values()}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def tokens(self) -> Tensor:
        return folder_tokens(self.folder)

    def outputs(self, tokens: Tensor, dtype: torch.dtype) -> Iterable[tuple[str, Tensor]]:
        return folder_outputs(self.folder, tokens, dtype)


def verify(one: Place, other: Place, config_files: Sequence[str] = ()) -> Difference:
    """Compare the logits of two models in fp32, their weights rounded to the narrower of their two types.

    A checkpoint is run by our network, a Hugging Face folder by transformers, both layer by layer. `config_files`: of
    a GPT-NeoX run; without them its folder takes the configuration of the other side.

    Raises `UserError` when one is missing, or their sizes or tokenizers differ.
    """

    def open_side(place: Place, reference: Reference | None) -> _Ours | _Theirs:
        if place.is_hf:
            return _Theirs(place.folder())
        opened = open_source(place.path, config_files, iteration=place.iteration, reference=reference, key=place.key)
        return _Ours(opened[0], opened[1].model)

    first, second = open_pair(one, other, open_side, _reference_to)
    if first.vocab_size != second.vocab_size:
        raise UserError(f"{one.path} has {first.vocab_size} tokens, {other.path} has {second.vocab_size}")
    _compare_tokenizers(first, second)
    _compare_tokenizers(second, first)
    dtype = narrower(first.dtype, second.dtype)
    tokens = max((side.tokens() for side in (first, second)), key=lambda ids: ids.shape[1])
    shown = progress(first.outputs(tokens, dtype), what="comparing", unit="layers")
    return compare_outputs(shown, second.outputs(tokens, dtype))


def _compare_tokenizers(one: _Ours | _Theirs, other: _Ours | _Theirs) -> None:
    """The tokenizer in a Hugging Face folder is that of the checkpoint, if both are known."""
    if isinstance(one, _Ours) and isinstance(other, _Theirs):
        path = str(other.folder.path)
        keys = tokenizer_keys(other.folder.path, path)
        if keys:
            tokenizer = create_tokenizer(**keys)
            check_tokenizer(one.reader.checkpoint, tokenizer, way_out=f"remove the tokenizer's files from {path}")


def narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The type that both are rounded to before they are compared: a copy in bf16 is equal to its fp32 original."""
    if one == other:
        return one
    if torch.float32 in (one, other):
        return other if one == torch.float32 else one
    return torch.float32


def _reference_to(side: _Ours | _Theirs) -> Reference:
    """The network of one side, which the other should have."""
    if isinstance(side, _Theirs):
        return reference_of(side.folder)
    return Reference(side.model, side.vocab_size, {}, str(side.reader.folder))
