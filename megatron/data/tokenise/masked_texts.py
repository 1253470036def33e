"""The encoder of texts whose beginning is not trained: everything up to and including a delimiter such as "Answer:".

Shapes: n tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.sample import IGNORE
from megatron.data.tokenise.chunks import Chunk
from megatron.data.tokenise.encode import Encoded, Output, Tally
from megatron.data.tokenise.texts import EncodeOptions, text_fixer, usable_texts
from megatron.data.tokens.indexed import DTYPES, token_dtype
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import single
from megatron.tokenizer.hugging_face import LibraryTokenizer

INT32 = DTYPES[4]


@dataclass(frozen=True)
class Delimiter:
    """What ends the untrained beginning: consecutive token ids, or a string."""

    ids: tuple[int, ...] = ()
    text: str = ""

    @classmethod
    def parse(cls, given: str | None) -> Delimiter:
        """From the flag: `25,198` are ids, everything else is a string; None: no delimiter."""
        if not given:
            return cls()
        parts = [part.strip() for part in given.split(",")]
        if all(part.isascii() and part.isdigit() for part in parts):
            return cls(ids=tuple(map(int, parts)))
        return cls(text=given)

    def __bool__(self) -> bool:
        return bool(self.ids or self.text)


class MaskedTextEncoder:
    """Tokenises the texts of chunks and labels them; see `encode.ChunkEncoder`.

    Labels are the tokens themselves, -100 up to and including the first delimiter. A text without one is trained whole,
    as in GPT-NeoX, or left out (`drop_unmatched`).
    """

    def __init__(
        self, tokenizer: Tokenizer, options: EncodeOptions, delimiter: Delimiter, *, drop_unmatched: bool = False
    ) -> None:
        """Raises `UserError` for a delimiter that can never be found, and as `TextEncoder` does."""
        self.tokenizer, self.options, self.delimiter = tokenizer, options, delimiter
        self.drop_unmatched = drop_unmatched
        self.eod, self._fix = options.eod_of(tokenizer), text_fixer(options.ftfy)
        if delimiter.ids and max(delimiter.ids) >= tokenizer.vocab_size:
            raise UserError(
                f"--mask-before-token: id {max(delimiter.ids)} is outside the vocabulary of {tokenizer.vocab_size}"
            )
        if delimiter.text and not isinstance(tokenizer, LibraryTokenizer):
            raise UserError(
                f"--mask-before-token {delimiter.text}: {tokenizer.name} does not report the positions of its tokens. "
                f"Give ids: {','.join(map(str, tokenizer.tokenize(delimiter.text)))} is this text on its own"
            )
        self.outputs = tuple(self._outputs(token_dtype(tokenizer.vocab_size)))

    def _outputs(self, dtype: np.dtype) -> list[Output]:
        keys, given = self.options.keys, self.delimiter
        shown = given.text or list(given.ids)
        extra = {"append_eod": self.options.append_eod, "ftfy": self.options.ftfy, "mask_before": shown}
        if not given:
            extra["no_mask"] = True
        found = []
        for key in keys:
            # The name that GPT-NeoX gives the labels of its only key.
            labels = "_label_document" if keys == ("text",) else f"_{key}_label_document"
            found += [
                Output(f"_{key}_document", dtype, key, extra, framed=True),
                Output(labels, INT32, key, extra, framed=True),
            ]
        return found

    def encode(self, chunk: Chunk) -> Encoded:
        """Tokenise and label the documents of a chunk; empty ones are counted and left out."""
        tally = Tally.zero(len(self.outputs), chunk.nbytes)
        columns, faults = chunk.columns(self.options.keys)
        for fault in faults:
            tally.refuse(fault, self.options.skip_bad)
        values: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        for index, texts in enumerate(columns):
            rows, labels, nbytes = self._rows(texts)
            at = 2 * index
            tally.empty[at] = len(texts) - len(rows)
            tally.documents[at : at + 2] = [len(rows)] * 2
            tally.tokens[at] = sum(map(len, rows))  # labels are not counted as tokens
            tally.text_bytes[at] = nbytes
            sizes = np.array([len(row) for row in rows], dtype=np.int64)
            values += [_concatenate(rows, self.outputs[at].dtype), _concatenate(labels, INT32)]
            lengths += [sizes, sizes]
        return Encoded(values, lengths, tally)

    def _rows(self, texts: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray], int]:
        """Tokens and labels of the texts that are kept, and their size in bytes."""
        texts = usable_texts(texts, self._fix)
        tail = [] if self.eod is None else [self.eod]
        rows, labels, nbytes = [], [], 0
        for text, ids, first in zip(texts, *self._tokenise(texts)):
            if not len(ids) or (first is None and self.drop_unmatched):
                continue
            row = ids if list(ids[-1:]) == tail else np.append(ids, tail).astype(np.int64)
            rows.append(row)
            labels.append(np.where(np.arange(len(row)) < (first or 0), IGNORE, row))
            nbytes += len(text.encode("utf-8"))
        return rows, labels, nbytes

    def _tokenise(self, texts: Sequence[str]) -> tuple[list[np.ndarray], list[int | None]]:
        """Ids of each text, and the position of its first trained token (None without the delimiter)."""
        if self.delimiter.text and isinstance(self.tokenizer, LibraryTokenizer):
            encodings = self.tokenizer.backend.encode_batch(list(texts))
            ends = [_end_of(self.delimiter.text, text) for text in texts]
            kept = [single(encoding.ids, *self.tokenizer.added) for encoding in encodings]
            found = [_first_after(np.array(e.offsets[own]), end) for e, own, end in zip(encodings, kept, ends)]
            return [np.array(e.ids[own], dtype=np.int64) for e, own in zip(encodings, kept)], found
        rows = [np.array(row, dtype=np.int64) for row in self.tokenizer.tokenize_batch(texts)]
        rows = [row[single(row, *self.tokenizer.added)] for row in rows]
        pattern = np.array(self.delimiter.ids, dtype=np.int64)
        return rows, [_end_of_pattern(row, pattern) if len(pattern) else 0 for row in rows]


def _end_of(delimiter: str, text: str) -> int | None:
    at = text.find(delimiter)
    return at + len(delimiter) if at >= 0 else None


def _first_after(offsets: np.ndarray, end: int | None) -> int | None:
    """The first token with a character after `end`; the number of tokens when there is none."""
    if end is None:
        return None
    after = np.flatnonzero(offsets.reshape(-1, 2)[:, 1] > end)
    return int(after[0]) if len(after) else len(offsets)


def _end_of_pattern(row: np.ndarray, pattern: np.ndarray) -> int | None:
    """The position after the first occurrence of `pattern` `[m]` in `row` `[n]`, None without one."""
    if len(row) < len(pattern):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(row, len(pattern))
    found = np.flatnonzero((windows == pattern).all(axis=1))
    return int(found[0]) + len(pattern) if len(found) else None


def _concatenate(rows: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.concatenate(rows).astype(dtype) if rows else np.empty(0, dtype)
