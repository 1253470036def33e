"""Tokenizers without files: UTF-8 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.tokenizer.alphabet import byte_alphabet
from megatron.tokenizer.base import TOKENIZERS, Tokenizer
from megatron.tokenizer.ragged import Ragged


class CharLevelTokenizer(Tokenizer):
    """GPT-NeoX's byte tokenizer: id = byte, vocabulary 512, eod 0, pad 1 (so those two bytes are taken)."""

    name = "CharLevelTokenizer"
    eod = 0
    pad = 1

    @property
    def vocab_size(self) -> int:
        """512, as in GPT-NeoX; only the first 256 ids ever occur."""
        return 512

    def tokenize(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_exactly(self, texts: Sequence[str]) -> Ragged:
        """The UTF-8 bytes of each text."""
        return _bytes_of(texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode bytes (invalid sequences become U+FFFD); eod, pad and ids that are no byte are left out."""
        return bytes(i for i in ids if i < 256 and i not in (self.eod, self.pad)).decode("utf-8", "replace")

    def id_map(self) -> dict[int, str]:
        """Bytes in GPT-2's alphabet, with the two special ids named."""
        return byte_alphabet() | {0: "<|eod|>", 1: "<|pad|>"}

    def files(self) -> dict[str, Path]:
        """None."""
        return {}


class ByteTokenizer(Tokenizer):
    """Bytes 0-255 as they are, eod 256, pad 257: every text survives the round trip."""

    name = "bytes"
    eod = 256
    pad = 257

    def tokenize(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_exactly(self, texts: Sequence[str]) -> Ragged:
        """The UTF-8 bytes of each text."""
        return _bytes_of(texts)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode bytes (invalid sequences become U+FFFD); eod and pad are left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def id_map(self) -> dict[int, str]:
        """Bytes in GPT-2's alphabet, then eod and pad."""
        return byte_alphabet() | {256: "<|endoftext|>", 257: "<|padding|>"}

    def files(self) -> dict[str, Path]:
        """None."""
        return {}


def _bytes_of(texts: Sequence[str]) -> Ragged:
    encoded = [text.encode("utf-8") for text in texts]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return Ragged(np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32), lengths)


@TOKENIZERS.register("CharLevelTokenizer")
def char_level(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """No files are read."""
    return CharLevelTokenizer()


@TOKENIZERS.register("bytes")
def raw_bytes(vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """No files are read."""
    return ByteTokenizer()
