"""SentencePiece models (`tokenizer.model` of LLaMA, Gemma, T5, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import UserError
from megatron.tokenizer.base import TOKENIZERS, Tokenizer, required_file
from megatron.tokenizer.byte_counts import sentence_piece_counts

if TYPE_CHECKING:
    import numpy as np


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. No begin or end tokens are added to a text, as in GPT-NeoX."""

    name = "SPMTokenizer"

    def __init__(self, model: Any, path: Path) -> None:
        """`model` is a loaded `SentencePieceProcessor`, `path` its file."""
        self.model, self.path = model, path
        # `piece_to_id` answers the unknown id for a piece that is absent, which must not pass for an end of document.
        neox_eod = model.piece_to_id("<|endoftext|>")
        own = [i if i >= 0 else None for i in (model.eos_id(), model.pad_id())]
        self.eod = neox_eod if model.id_to_piece(neox_eod) == "<|endoftext|>" else own[0]
        self.pad = own[1]

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`."""
        return self.model.encode(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, on one thread (the workers are the parallelism)."""
        return self.model.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`; control pieces have none, ids outside the vocabulary are left out."""
        return self.model.decode([int(i) for i in ids if i < self.model.get_piece_size()])

    def id_map(self) -> dict[int, str]:
        """Every piece."""
        return {i: self.model.id_to_piece(i) for i in range(self.model.get_piece_size())}

    def byte_counts(self) -> np.ndarray:
        """Of the pieces; control pieces, and the unknown one, stand for no text."""
        model, pieces = self.model, range(self.model.get_piece_size())
        special = {i for i in pieces if model.is_control(i) or model.is_unknown(i)}
        return sentence_piece_counts(self.vocab_size, self._ids, special)

    def declared_id(self, role: str) -> int | None:
        """Of the model file's own control pieces."""
        ids = {"bos_token": self.model.bos_id(), "eos_token": self.model.eos_id(), "pad_token": self.model.pad_id()}
        return ids[role] if ids[role] >= 0 else None

    def files(self) -> dict[str, Path]:
        """The model file."""
        return {"tokenizer.model": self.path}


@TOKENIZERS.register("SPMTokenizer")
def sentence_piece(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """The SentencePiece model `vocab_file`, or the tokenizer.model in that folder."""
    path = required_file(vocab_file, "vocab_file", "SPMTokenizer", "a SentencePiece .model file")
    path = path / "tokenizer.model" if path.is_dir() else path
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError("SPMTokenizer needs sentencepiece: pip install sentencepiece") from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise UserError(f"vocab_file: {path} is not a SentencePiece model: {error}") from error
    return SentencePieceTokenizer(model, path)
