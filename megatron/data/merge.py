"""Joining datasets (shards of one corpus) into one: tokens, documents and manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megatron.data.manifest import Manifest, finalize_with_manifest, read_manifest
from megatron.errors import UserError
from megatron.tokenizer import Fingerprint

SUMMED = ("empty_documents", "bad_records", "text_bytes")  # counts among a manifest's `extra`


def datasets_in(folder: Path, without: str) -> list[str]:
    """Prefixes of the datasets in `folder`, numbers in names in numeric order, the dataset `without` left out.

    Raises `UserError` when there are none, or half of one.
    """
    if not folder.is_dir():
        raise UserError(f"--input: {folder} is not a folder")
    halves = {suffix: {str(path.with_suffix("")) for path in folder.glob(f"*{suffix}")} for suffix in (".bin", ".idx")}
    for prefix in sorted(halves[".bin"] ^ halves[".idx"]):
        lacking = ".bin" if prefix in halves[".idx"] else ".idx"
        raise UserError(f"{prefix}{lacking} is missing: the dataset is incomplete")
    found = sorted(halves[".idx"] - {str(Path(without))}, key=_natural)
    if not found:
        raise UserError(f"--input: no .bin/.idx datasets in {folder}")
    return found


def merge_datasets(prefixes: Sequence[str], output: str) -> Manifest:
    """Write the documents of all datasets, one dataset after the other, as `output`; appears when it is complete.

    The result has a tokenizer fingerprint when all parts have one. Raises `UserError` when types or fingerprints
    differ.
    """
    parts = [read_manifest(prefix) for prefix in prefixes]
    fingerprint = _common_fingerprint(prefixes, parts)
    with IndexedDatasetBuilder(output, IndexedDataset(prefixes[0]).dtype) as builder:
        for prefix in prefixes:
            builder.append(prefix)
        return finalize_with_manifest(
            builder, tokenizer=fingerprint, source=_source(prefixes, parts), extra=_extra(parts)
        )


def _common_fingerprint(prefixes: Sequence[str], parts: Sequence[Manifest | None]) -> Fingerprint | None:
    known = [(prefix, part.tokenizer) for prefix, part in zip(prefixes, parts) if part and part.tokenizer]
    for prefix, tokenizer in known:
        if tokenizer != known[0][1]:
            raise UserError(f"{prefix} and {known[0][0]} were made with different tokenizers: they cannot be merged")
    return Fingerprint.from_dict(known[0][1]) if len(known) == len(prefixes) else None


def _source(prefixes: Sequence[str], parts: Sequence[Manifest | None]) -> Any:
    """What one run over all inputs would have written, when the parts say what their inputs were."""
    sources = [part.source for part in parts if part and isinstance(part.source, dict)]
    if len(sources) == len(parts) and all(set(source) == {"files"} for source in sources):
        return {"files": [name for source in sources for name in source["files"]]}
    return {"merged": [Path(prefix).name for prefix in prefixes]}


def _extra(manifests: Sequence[Manifest | None]) -> dict[str, Any]:
    """Counts added up; of the rest, what all parts agree on. Nothing when a part tells nothing."""
    parts = [part for part in manifests if part is not None]
    if len(parts) < len(manifests):
        return {}
    extra = {key: value for key, value in parts[0].extra.items() if all(p.extra.get(key) == value for p in parts)}
    return extra | {key: sum(p.extra[key] for p in parts) for key in SUMMED if all(key in p.extra for p in parts)}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
