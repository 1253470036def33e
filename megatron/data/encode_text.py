"""The encoder of plain texts: one dataset per key of the records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.chunks import Chunk, Document, Fault
from megatron.data.encode import Encoded, Output, Tally
from megatron.data.indexed import token_dtype
from megatron.errors import DeepyError, UserError
from megatron.tokenizer import Ragged, Tokenizer, choose_encoder


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
        rows = self.tokenizer.encode_batch(texts)
        lengths = rows.lengths
        if len(rows.ids) and int(rows.ids.max()) >= self.tokenizer.vocab_size:  # 16 bits would wrap it silently
            raise DeepyError(f"{self.tokenizer.describe()}: id {rows.ids.max()} is outside its own vocabulary")
        if not lengths.all():  # nothing left of a text after the tokenizer's normalisation
            texts = [text for text, length in zip(texts, lengths) if length]
            tally.empty[index] += len(lengths) - len(texts)
            lengths = lengths[lengths > 0]
        rows = Ragged(rows.ids.astype(self.dtype, copy=False), lengths)
        if self.eod is not None:
            rows = rows.framed((), (self.eod,))
        tally.text_bytes[index] += sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        tally.documents[index], tally.tokens[index] = len(texts), len(rows.ids)
        return rows.ids, rows.lengths


def take_fast_encoder(encoder: TextEncoder, chunks: Iterable[Chunk], wanted: str = "auto") -> Iterator[Chunk]:
    """Let the encoder's tokenizer use the fastest exact way (`choose_encoder`), tried on the first texts of `chunks`.

    Returns all of the chunks. Raises `UserError` when `wanted` cannot be had.
    """
    chunks = iter(chunks)
    first = list(itertools.islice(chunks, 1))
    documents = (document for chunk in first for document in chunk.documents(encoder.options.keys))
    texts = (text for document in documents if isinstance(document, Document) for text in document.texts.values())
    choose_encoder(encoder.tokenizer, wanted, texts)
    return itertools.chain(first, chunks)


def _ftfy() -> Callable[[str], str]:
    try:
        from ftfy import fix_text
    except ImportError as error:
        raise UserError("--ftfy needs ftfy: pip install -r requirements/requirements.txt") from error
    return fix_text
