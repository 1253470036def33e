"""How many bytes of text a token stands for: a loss in bits per byte is the same quantity for every tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np

from megatron.tokenizer.alphabet import byte_alphabet

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_level_counts(
    size: int, ids: Mapping[int, str], plain: Collection[int], special: Collection[int]
) -> np.ndarray:
    """Of a vocabulary in GPT-2's alphabet, in which a letter is a byte: int64 `[size]`.

    Args:
        size: of the vocabulary.
        ids: every id with its token.
        plain: ids whose tokens are text as it is (added tokens).
        special: ids that stand for no text.
    """
    known = set(byte_alphabet().values())
    counts = np.zeros(size, np.int64)
    for i, token in ids.items():
        if i in special:
            continue
        counts[i] = len(token) if i not in plain and known.issuperset(token) else len(token.encode())
    return counts


def sentence_piece_counts(size: int, ids: Mapping[int, str], special: Collection[int]) -> np.ndarray:
    """Of SentencePiece's pieces, in which `▁` is a space and `<0x0A>` a byte. The space that it puts before a text is
    counted, as it is predicted."""
    counts = np.zeros(size, np.int64)
    for i, token in ids.items():
        if i not in special:
            counts[i] = 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())
    return counts
