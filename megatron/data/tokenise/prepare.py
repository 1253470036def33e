"""A named corpus, ready for training, in one go: find or fetch it, find or train its tokenizer, tokenise it."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.tokenise.chunks import Chunk
from megatron.data.tokenise.corpora import NAMES, hub_chunks, stdlib_files
from megatron.data.tokenise.encode import write_datasets
from megatron.data.tokenise.formats import text_files
from megatron.data.tokenise.progress import TallyProgress
from megatron.data.tokenise.texts import EncodeOptions, TextEncoder, texts_of
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import check_tokenizer
from megatron.data.tokens.prefixes import exists
from megatron.data.tokens.shuffle import SHUFFLED
from megatron.errors import UserError, nearest
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer, choose_encoder, create_tokenizer
from megatron.tokenizer.hub import fetch
from megatron.tokenizer.train import train_bpe

STDLIB_VOCAB = 8192
SUFFIX = "_text_document"

logger = get_logger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus, as a run's config names it."""

    data_path: str
    tokenizer_type: str
    vocab_file: str | None
    merge_file: str | None

    def as_yaml(self) -> str:
        """Lines for a run's YAML file."""
        values = {"data_path": self.data_path, "tokenizer_type": self.tokenizer_type}
        values |= {key: value for key in ("vocab_file", "merge_file") if (value := getattr(self, key))}
        return "\n".join(f'"{key}": "{value}",' for key, value in values.items())


def prepare(
    name: str,
    data_dir: str,
    *,
    tokenizer_type: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    force: bool = False,
    stdlib_root: Path | None = None,
) -> Prepared:
    """Write `<data_dir>/<name>/<name>_text_document.{bin,idx}` and whatever tokenizer it needs.

    Args:
        name: one of `corpora.NAMES`.
        tokenizer_type: default: for `stdlib` a BPE trained on the corpus (`<data_dir>/stdlib/tokenizer.json`), else
            `GPT2BPETokenizer`, whose files are downloaded to `data_dir` unless given.
        force: make everything again; otherwise what exists is used.
        stdlib_root: folder of the standard library (default: the running Python's).

    Raises `UserError` for an unknown name, without a network, and for existing data of another tokenizer.
    """
    if name not in NAMES:
        raise UserError(f"no corpus is called {name!r}.{nearest(name, list(NAMES))} Known: {', '.join(NAMES)}")
    folder = Path(data_dir) / name
    prefix = str(folder / name)  # of `<prefix>_text_document`
    chunks: Iterator[Chunk]
    if name == "stdlib":
        files = stdlib_files(stdlib_root)
        size = sum(path.stat().st_size for path in files)
        logger.info(f"stdlib: {len(files)} files, {size / 1e6:.1f} MB")
        chunks, total_bytes = text_files(files), size
        source: dict[str, Any] = {"corpus": name, "python": sys.version.split()[0], SHUFFLED: "by path"}
        if tokenizer_type is None and vocab_file is None:
            tokenizer_type, vocab_file = "HFTokenizer", str(folder / "tokenizer.json")
            _train_unless_there(files, Path(vocab_file), force)
    else:
        chunks, total_bytes, source = hub_chunks(name), None, {"corpus": name}
    tokenizer_type = tokenizer_type or "GPT2BPETokenizer"
    if tokenizer_type == "GPT2BPETokenizer" and not vocab_file and not merge_file:
        vocab_file, merge_file = _gpt2_files(Path(data_dir), force)
    tokenizer = create_tokenizer(tokenizer_type, vocab_file, merge_file)
    if not force and exists(prefix + SUFFIX):
        _reuse(prefix + SUFFIX, tokenizer)
    else:
        _tokenise(chunks, tokenizer, prefix, total_bytes, source)
    return Prepared(prefix + SUFFIX, tokenizer_type, vocab_file, merge_file)


def _train_unless_there(files: list[Path], tokenizer_json: Path, force: bool) -> None:
    if tokenizer_json.exists() and not force:
        logger.info(f"tokenizer: {tokenizer_json} exists")
        return
    logger.info(f"tokenizer: training a byte-level BPE of {STDLIB_VOCAB} entries (about ten seconds)")
    size = train_bpe(texts_of(text_files(files)), STDLIB_VOCAB, tokenizer_json)
    logger.info(f"tokenizer: {tokenizer_json}, vocabulary {size}")


def _reuse(prefix: str, tokenizer: Tokenizer) -> None:
    try:
        data = IndexedDataset(prefix)
        check_tokenizer(data, tokenizer)
    except UserError as error:
        raise UserError(f"{error} (-f writes it again)") from error
    logger.info(f"{prefix} exists (-f writes it again)")


def _tokenise(
    chunks: Iterator[Chunk], tokenizer: Tokenizer, prefix: str, total_bytes: int | None, source: dict[str, Any]
) -> None:
    encoder = TextEncoder(tokenizer, EncodeOptions(append_eod=True, skip_bad=True))
    with TallyProgress("tokenising", total_bytes) as progress:
        first = list(itertools.islice(chunks, 1))
        choose_encoder(tokenizer, sample=texts_of(first))
        (manifest,), _ = write_datasets(itertools.chain(first, chunks), encoder, prefix, source=source, report=progress)
    logger.info(f"{prefix}{SUFFIX}: {manifest.documents} documents, {manifest.tokens} tokens")


def _gpt2_files(data_dir: Path, force: bool) -> tuple[str, str]:
    """GPT-2's vocabulary and merges in `data_dir`, under NeoX's names, downloaded when missing."""
    instead = (
        "Give -v and -m, or run `python prepare_data.py stdlib`, which makes a corpus and its tokenizer from files on "
        "this machine."
    )
    paths = []
    for here, there in (("gpt2-vocab.json", "vocab.json"), ("gpt2-merges.txt", "merges.txt")):
        path = data_dir / here
        if force or not path.exists():
            fetched = fetch("openai-community/gpt2", there, key="vocab_file", instead=instead)
            data_dir.mkdir(parents=True, exist_ok=True)
            temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            shutil.copyfile(fetched, temp)
            os.replace(temp, path)
        paths.append(str(path))
    return paths[0], paths[1]
