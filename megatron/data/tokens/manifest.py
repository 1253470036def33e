"""The manifest next to a dataset: `<prefix>.manifest.json` says what the tokens are and where they came from.

GPT-NeoX writes none, so data without one is accepted with a warning and a check of its ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.partial import PARTIAL, WriteError
from megatron.errors import UserError
from megatron.log import Once, get_logger
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fingerprint import Fingerprint

FORMAT_VERSION = 1
SCAN_BYTES = 1 << 28  # how much of a dataset without manifest is searched for ids beyond the vocabulary


@dataclass(frozen=True)
class Manifest:
    """What is known of a dataset. Holds no times or machine names: the same input gives the same file.

    `tokenizer` is the fingerprint of the id map (`Fingerprint.to_dict`), None for what holds no ids (rewards,
    log-probabilities); `source` is free text or a JSON-able description of the input.
    """

    items: int
    documents: int
    tokens: int
    dtype: str
    index_sha256: str
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
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(f"{path}: format version {version}, but this program reads version {FORMAT_VERSION}.")
        return Manifest(**raw)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a dataset manifest ({error}). Remove it or tokenise the data again.") from error


def verify(prefix: str | Path) -> Manifest | None:
    """Check a dataset against its manifest: counts, type and the checksum of the index. Reads the whole index.

    Returns the manifest, None when there is none. Raises `UserError` naming what differs.
    """
    data = IndexedDataset(prefix)
    manifest = read_manifest(data.prefix)
    if manifest is None:
        return None
    found = {
        "items": len(data),
        "documents": data.num_documents,
        "tokens": data.num_tokens,
        "dtype": data.dtype.name,
        "index_sha256": _sha256(Path(f"{data.prefix}.idx")),
    }
    for key, value in found.items():
        if value != getattr(manifest, key):
            raise UserError(
                f"{data.prefix}: {key} is {value}, but {manifest_path(data.prefix)} says {getattr(manifest, key)}. "
                "The dataset was changed after it was written, or the files do not belong together."
            )
    return manifest


def check_tokenizer(data: IndexedDataset, tokenizer: Tokenizer, once: Once | None = None) -> None:
    """Refuse data that another tokenizer made.

    Accepted: data whose id map equals the run's or is contained in it (a base vocabulary under its instruct extension).
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
    try:
        fingerprint = Fingerprint.from_dict(manifest.tokenizer)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{manifest_path(prefix)}: unreadable tokenizer fingerprint ({error!r})") from error
    if not tokenizer.covers(fingerprint):
        raise UserError(
            f"{prefix} was made with another tokenizer than this run's {tokenizer.describe()} (their ids mean "
            "different tokens). Set tokenizer_type/vocab_file to the one that made the data, or tokenise it again."
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
