"""From configuration to a tokenizer."""

from __future__ import annotations

from typing import Protocol

from megatron.tokenizer import hugging_face, sentence_piece, simple, tiktoken_bpe
from megatron.tokenizer.base import TOKENIZERS, Tokenizer

# Importing these files is what fills the registry; their optional libraries load only when an entry is used.
PROVIDERS = (hugging_face, sentence_piece, simple, tiktoken_bpe)


class TokenizerFiles(Protocol):
    """The part of the config group `tokenizer` that picks a tokenizer."""

    @property
    def tokenizer_type(self) -> str: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def vocab_size(self) -> int | None: ...


def build_tokenizer(cfg: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a run's config group. Raises `UserError` for an unknown type or missing files.

    With `vocab_size` its ids are as many as the model's rows: published models often have some without a token.
    """
    tokenizer = create_tokenizer(cfg.tokenizer_type, cfg.vocab_file, cfg.merge_file)
    if cfg.vocab_size is not None:
        tokenizer.reserve(cfg.vocab_size)
    return tokenizer


def create_tokenizer(tokenizer_type: str, vocab_file: str | None = None, merge_file: str | None = None) -> Tokenizer:
    """The tokenizer of that type, from plain values (as the command-line tools have them)."""
    return TOKENIZERS[tokenizer_type](vocab_file, merge_file)
