"""The encoder of plain texts: one dataset per key of the records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.tokenise.chunks import Chunk, Document
from megatron.data.tokenise.encode import Encoded, Output, Tally
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokens.indexed import token_dtype
from megatron.errors import DeepyError, UserError
from megatron.tokenizer import Ragged, Tokenizer

SAMPLED_FILES = 8
SAMPLED_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class EncodeOptions:
    """What of a record is tokenised and how.

    `keys`: each makes a dataset of its own. `append_eod`: end every document with the tokenizer's eod. `ftfy`: repair
    broken Unicode first. `skip_bad`: leave out and count unusable records instead of stopping.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False
    skip_bad: bool = False

    def eod_of(self, tokenizer: Tokenizer) -> int | None:
        """The id to append to every document that does not end with it, None when the tokenizer appends it to all.

        Raises `UserError` when eod is wanted and the tokenizer has none.
        """
        eod = tokenizer.require_eod("--append-eod") if self.append_eod else None
        return None if eod is not None and tokenizer.added[1][-1:] == (eod,) else eod


class TextEncoder:
    """Tokenises the texts of chunks; see `encode.ChunkEncoder`."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        """Raises `UserError` when eod is wanted and the tokenizer has none, or ftfy is wanted and not installed."""
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        extra = {"append_eod": options.append_eod, "ftfy": options.ftfy}
        self.outputs = tuple(Output(f"_{key}_document", self.dtype, key, extra, framed=True) for key in options.keys)
        self.eod, self._fix = options.eod_of(tokenizer), text_fixer(options.ftfy)

    def encode(self, chunk: Chunk) -> Encoded:
        """Tokenise the documents of a chunk; empty ones are counted and left out."""
        keys = self.options.keys
        tally = Tally.zero(len(keys), chunk.nbytes)
        columns, faults = chunk.columns(keys)
        for fault in faults:
            tally.refuse(fault, self.options.skip_bad)
        ids, lengths = zip(*(self._column(texts, tally, index) for index, texts in enumerate(columns)))
        return Encoded(list(ids), list(lengths), tally)

    def _column(self, texts: list[str], tally: Tally, index: int) -> tuple[np.ndarray, np.ndarray]:
        given, texts = len(texts), usable_texts(texts, self._fix)
        rows = self.tokenizer.encode_batch(texts).single(*self.tokenizer.added)
        lengths = rows.lengths
        if len(rows.ids) and int(rows.ids.max()) >= self.tokenizer.vocab_size:  # 16 bits would wrap it silently
            raise DeepyError(
                f"{self.tokenizer.describe()}: id {rows.ids.max()} is outside its own vocabulary of "
                f"{self.tokenizer.vocab_size} ids"
            )
        if not lengths.all():  # nothing left of a text after the tokenizer's normalisation
            texts = [text for text, length in zip(texts, lengths) if length]
            lengths = lengths[lengths > 0]
        rows = Ragged(rows.ids.astype(self.dtype, copy=False), lengths)
        if self.eod is not None:
            rows = rows.frame((), (self.eod,)).single((), (self.eod,))
        tally.text_bytes[index] += sum(len(text) if text.isascii() else len(text.encode("utf-8")) for text in texts)
        tally.documents[index], tally.tokens[index] = len(texts), len(rows.ids)
        tally.empty[index] = given - len(texts)
        return rows.ids, rows.lengths


def text_fixer(ftfy: bool) -> Callable[[str], str] | None:
    """ftfy's `fix_text`, which repairs broken Unicode, if `ftfy`. Raises `UserError` when it is not installed."""
    if not ftfy:
        return None
    try:
        from ftfy import fix_text
    except ImportError as error:
        raise UserError("--ftfy needs ftfy: pip install ftfy") from error
    return fix_text


def usable_texts(texts: Sequence[str], fix: Callable[[str], str] | None) -> list[str]:
    """The texts after `fix`, without the empty ones. White space alone is a text, as in GPT-NeoX."""
    fixed = texts if fix is None else map(fix, texts)
    return [text for text in fixed if text]


def sample_of_files(paths: Sequence[Path], keys: Sequence[str]) -> Iterator[str]:
    """Texts from the start of a few files, on which an encoder can be tried (`tokenizer.choose_encoder`).

    Raises `UserError` for a file that cannot be read. Skips pipes, which can be read only once.
    """
    files = [path for path in paths if path.is_file()]
    for path in files[:: max(len(files) // SAMPLED_FILES, 1)][:SAMPLED_FILES]:
        left = SAMPLED_CHARACTERS // min(len(files), SAMPLED_FILES)
        for text in texts_of(itertools.islice(read_chunks([path]), 1), keys):
            yield text
            left -= len(text)
            if left <= 0:
                break


def texts_of(chunks: Iterable[Chunk], keys: Sequence[str] = ("text",)) -> Iterator[str]:
    """The texts of chunks, unusable records left out."""
    documents = (document for chunk in chunks for document in chunk.documents(keys))
    return (text for document in documents if isinstance(document, Document) for text in document.texts.values())
