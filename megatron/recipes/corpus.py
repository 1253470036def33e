"""From files of text to token files with a tokenizer of their own, in one folder; what is whole there is used again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.order.splits import split_bounds
from megatron.data.tokenise.command import CommandOptions, tokenise_shuffled, tokenizer_identity
from megatron.data.tokenise.compression import COMPRESSIONS, ending_of
from megatron.data.tokenise.formats import TEXTS, kind_of, read_chunks
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder, sample_of_files, texts_of
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import verify
from megatron.data.tokens.prefixes import exists
from megatron.errors import UserError
from megatron.files import read_json, write_atomically
from megatron.log import ProgressBar, get_logger
from megatron.tokenizer import Tokenizer, choose_encoder, create_tokenizer
from megatron.tokenizer.train import train_bpe, write_companions

RECORD = "made_of.json"  # in a folder that is whole: what its content was made of
TOKENIZER_BYTES = 1 << 28  # of text that a tokenizer is trained on, taken from everywhere
_UNPACKED = 4  # about how many times larger a compressed file is
_PIECES = 10  # pieces of documents that the validation set consists of at least

logger = get_logger(__name__)


@dataclass(frozen=True)
class Source:
    """The files of a corpus, and what of them is a text: the `key` of their records. `skip_bad`: leave out the rest."""

    files: Sequence[Path]
    key: str = "text"
    skip_bad: bool = False

    @property
    def text_bytes(self) -> int:
        """About how much text it is."""
        return sum(path.stat().st_size * (_UNPACKED if ending_of(path) in COMPRESSIONS else 1) for path in self.files)

    @property
    def leaves_out(self) -> bool:
        """Whether unusable records are left out: always those of plain texts, each of which is a file."""
        return self.skip_bad or all(kind_of(path) in TEXTS for path in self.files)

    def identity(self) -> list[Any]:
        """What tells it from another corpus."""
        stats = [(path, path.stat()) for path in self.files]
        return [self.key, self.leaves_out, [[str(path.absolute()), s.st_size, s.st_mtime_ns] for path, s in stats]]


@dataclass(frozen=True)
class Corpus:
    """A corpus as tokens. The last of its documents, in an order of chance, are for validation."""

    prefix: str
    split: str
    train_documents: int
    valid_documents: int
    train_tokens: int
    valid_tokens: int


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file or folder, of the type that its name says. Raises `UserError` when there is none."""
    kinds = {".model": "SPMTokenizer", ".tiktoken": "TiktokenTokenizer"}
    if not path.exists():
        raise UserError(
            f"--tokenizer {path}: no such file; give a tokenizer.json, a Hugging Face folder, or a .model file"
        )
    tokenizer = create_tokenizer(kinds.get(path.suffix, "HFTokenizer"), str(path), None)
    tokenizer.require_eod("--tokenizer")
    return tokenizer


def make_tokenizer(source: Source, folder: Path, size: int) -> Tokenizer:
    """A byte-level BPE of at most `size` entries, trained on the corpus and written to `folder`, unless it is there."""
    identity, file = ["tokenizer", source.identity(), size], folder / "tokenizer.json"
    if file.exists() and _is_made(folder, identity):
        logger.info(f"tokenizer: {folder} is there")
    else:
        _forget(folder)
        texts = _sampled(source, size)
        reached = train_bpe(texts, size, file)
        write_companions(folder)
        _remember(folder, identity)
        logger.info(f"tokenizer: {folder}, vocabulary {reached}")
    return create_tokenizer("HFTokenizer", str(folder), None)


def _sampled(source: Source, size: int) -> Iterator[str]:
    stride = max(1, -(-source.text_bytes // TOKENIZER_BYTES))
    total = sum(path.stat().st_size for path in source.files)
    with ProgressBar(f"reading for a tokenizer of {size} entries", total, "B") as progress:
        for number, chunk in enumerate(read_chunks(source.files)):
            if number % stride == 0:
                yield from texts_of([chunk], [source.key])
            progress(chunk.nbytes)


def tokenise(source: Source, tokenizer: Tokenizer, folder: Path, *, valid: float, seed: int, workers: int) -> Corpus:
    """The token files of the corpus in `folder`, unless they are there; documents in an order of chance, of `seed`.

    Args:
        valid: the share of the documents that is for validation. Documents of more than a tenth of it are cut, so that
            it is neither one text nor none.

    Raises `UserError` as `tokenise_shuffled` does, and where a share above 0 has no document.
    """
    identity = ["tokens", source.identity(), tokenizer_identity(tokenizer), valid, seed]
    prefix = str(folder / "corpus")
    data = f"{prefix}_{source.key}_document"
    if exists(data) and _is_made(folder, identity):
        verify(data)
        logger.info(f"tokens: {data} is there")
    else:
        _forget(folder)
        encoder = TextEncoder(tokenizer, EncodeOptions((source.key,), append_eod=True, skip_bad=source.leaves_out))
        choose_encoder(tokenizer, sample=sample_of_files(source.files, [source.key]))
        options = CommandOptions(workers=workers)
        tokenise_shuffled(
            source.files,
            encoder,
            prefix,
            options,
            seed=seed,
            skip_bad=source.leaves_out,
            longest=(lambda tokens: max(1, int(tokens * valid / _PIECES))) if valid else None,
        )
        _remember(folder, identity)
    return _divide(data, valid)


def _divide(data: str, valid: float) -> Corpus:
    split = f"{100 * (1 - valid):g},{100 * valid:g},0"
    tokens = IndexedDataset(data)
    _, end, last, _ = split_bounds(split, len(tokens))
    if valid and end == last:
        raise UserError(
            f"--valid {valid:g}: of {len(tokens)} documents that is none; give a larger share, or more text"
        )
    held = int(tokens.sizes[end:last].sum())
    return Corpus(data, split, end, last - end, tokens.num_tokens - held, held)


def _is_made(folder: Path, identity: list[Any]) -> bool:
    """Whether what `folder` holds was completed for this `identity`."""
    try:
        return read_json(_record(folder)) == {"made_of": json.loads(json.dumps(identity))}
    except (OSError, ValueError, UserError):
        return False


def _remember(folder: Path, identity: list[Any]) -> None:
    write_atomically(_record(folder), json.dumps({"made_of": identity}) + "\n")


def _forget(folder: Path) -> None:
    _record(folder).unlink(missing_ok=True)


def _record(folder: Path) -> Path:
    return folder / RECORD
