"""The encoder of plain texts: one dataset per key of the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.data.chunks import Chunk, Fault
from megatron.data.encode import Encoded, Output, Tally
from megatron.data.indexed import token_dtype
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodeOptions:
    """What of a record is tokenised and how.

    `keys`: each makes a dataset of its own. `append_eod`: end every document with the tokenizer's eod. `ftfy`: mend
    broken Unicode first. `skip_bad`: leave out records that cannot be used and count them, instead of stopping.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False
    skip_bad: bool = False


class TextEncoder:
    """Tokenises the texts of chunks; see `encode.ChunkEncoder`."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        """Raises `UserError` when eod is wanted and the tokenizer has none, or ftfy is wanted and not installed."""
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        said = {"append_eod": options.append_eod, "ftfy": options.ftfy}
        self.outputs = tuple(Output(f"_{key}_document", self.dtype, key, said) for key in options.keys)
        self.eod = tokenizer.require_eod("--append-eod") if options.append_eod else None
        # A tokenizer whose own template ends a text with eod must not get a second one.
        if self.eod is not None and tokenizer.tokenize("a")[-1:] == [self.eod]:
            self.eod = None
        self._fix: Callable[[str], str] | None = _ftfy() if options.ftfy else None

    def encode(self, chunk: Chunk) -> Encoded:
        """Tokenise the documents of a chunk; blank ones are counted and left out."""
        keys = self.options.keys
        tally = Tally.zero(len(keys), chunk.nbytes)
        texts: list[list[str]] = [[] for _ in keys]
        for document in chunk.documents(keys):
            if isinstance(document, Fault):
                tally.refuse(document, self.options.skip_bad)
                continue
            for column, key in enumerate(keys):
                text = document.texts[key]
                text = self._fix(text) if self._fix else text
                if not text or text.isspace():
                    tally.empty[column] += 1
                else:
                    texts[column].append(text)
        ids, lengths = zip(*(self._column(column, tally, index) for index, column in enumerate(texts)))
        return Encoded(list(ids), list(lengths), tally)

    def _column(self, texts: list[str], tally: Tally, index: int) -> tuple[np.ndarray, np.ndarray]:
        tail = [] if self.eod is None else [self.eod]
        rows = []
        for text, row in zip(texts, self.tokenizer.tokenize_batch(texts)):
            if row:
                rows.append(np.array(row + tail, dtype=self.dtype))
                tally.text_bytes[index] += len(text.encode("utf-8"))
            else:
                tally.empty[index] += 1  # nothing left after the tokenizer's normalisation
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tally.documents[index], tally.tokens[index] = len(rows), int(lengths.sum())
        return np.concatenate(rows) if rows else np.empty(0, self.dtype), lengths


def _ftfy() -> Callable[[str], str]:
    try:
        from ftfy import fix_text
    except ImportError as error:
        raise UserError("--ftfy needs ftfy: pip install -r requirements/requirements.txt") from error
    return fix_text
