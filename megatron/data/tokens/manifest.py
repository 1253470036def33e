"""The manifest next to a dataset: `<prefix>.manifest.json` says what the tokens are and where they came from.

GPT-NeoX writes none, so data without one is accepted with a warning and a check of its ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checksums import file_crc32, sample_crc32
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.partial import PARTIAL, WriteError
from megatron.errors import UserError
from megatron.files import from_json, read_json
from megatron.log import Once, get_logger
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fingerprint import Fingerprint

FORMAT_VERSION = 2  # 1 had no checksum of the tokens
TURN_ENDS = "turn_ends"  # in `extra`: the tokens with which trained turns of chats end
_AGAIN = "Remove it or tokenise the data again."
SUMMED = ("empty_documents", "bad_records", "text_bytes")  # counts among `extra`
SCAN_BYTES = 1 << 28  # how much of a dataset without manifest is searched for ids beyond the vocabulary


@dataclass(frozen=True)
class Manifest:
    """What is known of a dataset. Holds no times or machine names: the same input gives the same file.

    `tokenizer` is its fingerprint (`Fingerprint.to_dict`: the id map, and what it put around every text), None for what
    holds no ids (rewards, log-probabilities); `source` is free text or a JSON-able description of the input.
    `bin_crc32` is of all bytes of `.bin`, `bin_sample_crc32` of a few of them (`checksums.sample_crc32`), for every
    start; None in version 1.
    """

    items: int
    documents: int
    tokens: int
    dtype: str
    index_sha256: str
    bin_crc32: int | None = None
    bin_sample_crc32: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    source: Any = None
    format_version: int = FORMAT_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)


def manifest_path(prefix: str | Path) -> Path:
    """The path of a dataset's manifest."""
    return Path(f"{prefix}.manifest.json")


def finalize_with_manifest(
    builder: IndexedDatasetBuilder,
    *,
    tokenizer: Fingerprint | None,
    source: Any,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Finish a dataset and write its manifest, which appears before the index makes the dataset visible."""
    builder.finish()
    manifest = Manifest(
        items=builder.num_items,
        documents=builder.num_documents,
        tokens=builder.num_tokens,
        dtype=builder.dtype.name,
        index_sha256=_sha256(Path(builder.index_path)),
        bin_crc32=builder.crc32,
        bin_sample_crc32=sample_crc32(builder.tokens_path),
        tokenizer=tokenizer.to_dict() if tokenizer is not None else None,
        source=source,
        extra=dict(extra or {}),
    )
    # Written while an older dataset of that name is still untouched; only renames follow.
    temp = _write_temporary(builder.prefix, manifest)
    try:
        builder.finalize(lambda index: os.replace(temp, manifest_path(builder.prefix)))
    finally:
        temp.unlink(missing_ok=True)
    return manifest


def _write_temporary(prefix: str | Path, manifest: Manifest) -> Path:
    temp = Path(f"{manifest_path(prefix)}{PARTIAL}")
    try:
        temp.write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise WriteError(f"cannot write {temp}: {error.strerror or error}.") from error
    return temp


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest of a dataset, None when it has none. Raises `UserError` when the file is damaged."""
    path = manifest_path(prefix)
    try:
        raw = read_json(path, _AGAIN)
        version = raw.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UserError(f"{path}: format version {version}, but this program reads up to {FORMAT_VERSION}.")
        manifest = from_json(Manifest, raw)
        _check_extra(manifest.extra)
        if manifest.tokenizer is not None:
            Fingerprint.from_dict(manifest.tokenizer)
        return manifest
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a dataset manifest ({error}). {_AGAIN}") from error


def _check_extra(extra: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the entries that Deepy reads are what it writes."""
    counts = [key for key in SUMMED if type(extra.get(key, 0)) is not int]
    shard = extra.get("shard") or {}
    if counts or not isinstance(shard, Mapping) or (shard and not {"run", "index", "count"} <= shard.keys()):
        raise ValueError(f"extra.{counts[0] if counts else 'shard'} makes no sense")


def verify(dataset: IndexedDataset | str | Path, *, full: Callable[[int], None] | None = None) -> Manifest | None:
    """Compare a dataset (opened, or its prefix) with its manifest: counts, type, checksums of the index and of a sample
    of the tokens.

    With `full` that of all tokens instead; it is called with the bytes of every piece.
    Returns the manifest, None when there is none. Raises `UserError` naming file, what was expected and what was found.
    """
    data = dataset if isinstance(dataset, IndexedDataset) else IndexedDataset(dataset)
    manifest = read_manifest(data.prefix)
    if manifest is None:
        return None
    index, tokens = Path(f"{data.prefix}.idx"), Path(f"{data.prefix}.bin")
    checks: list[tuple[Path, str, Callable[[], Any]]] = [
        (index, "items", lambda: len(data)),
        (index, "documents", lambda: data.num_documents),
        (tokens, "tokens", lambda: data.num_tokens),
        (index, "dtype", lambda: data.dtype.name),
        (index, "index_sha256", lambda: _sha256(index)),
        (tokens, "bin_sample_crc32", lambda: sample_crc32(tokens))
        if full is None
        else (tokens, "bin_crc32", lambda: file_crc32(tokens, full)),
    ]
    for file, key, find in checks:
        expected = getattr(manifest, key)
        if expected is not None and (found := find()) != expected:
            raise UserError(
                f"{file}: {key} is {found}, but {manifest_path(data.prefix)} says {expected}. The file was damaged or "
                "replaced after it was written: copy it again from its source, or tokenise the data again."
            )
    return manifest


def check_tokenizer(data: IndexedDataset, tokenizer: Tokenizer, once: Once | None = None) -> None:
    """Refuse data that another tokenizer made.

    Accepted: data whose id map equals the run's or is contained in it (a base vocabulary under its instruct extension),
    and around whose texts the run's tokenizer would put the same start and end (where that is known).
    Without a fingerprint: one warning, and an error when an id is outside the vocabulary.
    """
    once = once or Once(get_logger(__name__))
    unknown = [part for part in data.parts if not _has_fingerprint(part.prefix, tokenizer, once)]
    if not unknown:
        return
    which = data.prefix if len(data.parts) == 1 else f"{data.prefix} ({len(unknown)} of its files)"
    once.warning(f"{which} has no manifest that names its tokenizer; only the range of its ids is checked")
    for part in unknown:
        check_id_range(part, tokenizer.vocab_size, SCAN_BYTES // len(unknown))


def _has_fingerprint(prefix: str, tokenizer: Tokenizer, once: Once) -> bool:
    """Whether the manifest has a fingerprint; raises `UserError` when it does not fit the tokenizer."""
    manifest = read_manifest(prefix)
    if manifest is None or manifest.tokenizer is None:
        return False
    if conflict := tokenizer.conflict(Fingerprint.from_dict(manifest.tokenizer)):
        raise UserError(
            f"{prefix} was made with another tokenizer than this run's {tokenizer.describe()} ({conflict}). "
            "Set tokenizer_type/vocab_file to the one that made the data, or tokenise it again."
        )
    _compare_eod(prefix, manifest, tokenizer, once)
    return True


def _compare_eod(prefix: str, manifest: Manifest, tokenizer: Tokenizer, once: Once) -> None:
    """An extension may end its texts with another token than its base, whose data can still be trained on."""
    stored = manifest.extra.get("eod")
    if manifest.extra.get("append_eod") and stored != tokenizer.eod:
        once.warning(
            f"{prefix}: documents end with id {stored}, but this run's tokenizer ends them with {tokenizer.eod}: "
            "intra_document_masking and eod_mask_loss do not find their borders"
        )


def check_id_range(data: IndexedDataset, vocab_size: int, most: int | None = None) -> None:
    """Raise `UserError` when an id is outside `[0, vocab_size)`; large files are sampled evenly, `most` bytes."""
    if data.dtype.kind not in "iu":
        raise UserError(f"{data.prefix} holds {data.dtype} values, not token ids.")
    tokens, piece = data.tokens, 1 << 20
    pieces = max(1, -(-len(tokens) // piece))
    step = max(1, pieces * piece * data.dtype.itemsize // max(1, SCAN_BYTES if most is None else most))
    for start in [*range(0, pieces, step), pieces - 1]:
        part = tokens[start * piece : (start + 1) * piece]
        if part.size and (int(part.max()) >= vocab_size or int(part.min()) < 0):
            position = start * piece + int(np.argmax((part >= vocab_size) | (part < 0)))
            raise UserError(
                f"{data.prefix}: token {position} has id {int(tokens[position])}, but the vocabulary has {vocab_size} "
                "entries: the data was made with another tokenizer."
            )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
