"""Checks of a dataset: index, ids, checksums of index and tokens, labels. Every fault is one line that names the file
and what to do. Reads in blocks, so memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.data.sample import IGNORE
from megatron.data.tokens import manifest as manifests
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.labels import check_labels, find_labels
from megatron.data.tokens.token_files import TokenFiles, find_files
from megatron.errors import UserError
from megatron.log import ProgressBar, progress

_PIECE = 1 << 22  # items or tokens that are checked together
_SAMPLED = 1 << 26  # tokens that are checked without `full`


@dataclass(frozen=True)
class Report:
    """What was found about one dataset; `faults` is empty when it is complete."""

    path: str
    facts: str = ""
    faults: list[str] = field(default_factory=list)


def verify_path(
    path: str | Path, *, full: bool = False, vocab_size: int | None = None, files: TokenFiles | None = None
) -> list[Report]:
    """Check every dataset of a data path (a glob means several), and the labels next to it.

    Args:
        full: check every token, not a sample of a few hundred megabytes.
        vocab_size: ids must be below it; by default that of the manifest.
        files: how token files without an index are opened.
    """
    try:
        found = find_files(path)
    except UserError as error:
        return [Report(str(path), faults=[str(error)])]
    return [_verify_one(one, full, vocab_size, files or TokenFiles()) for one in found]


def _verify_one(path: str, full: bool, vocab_size: int | None, files: TokenFiles) -> Report:
    try:
        data = files.open(path)
    except UserError as error:
        return Report(path, faults=[str(error)])
    manifest, faults = None, []
    checks: list[Callable[[], Iterator[str]]] = []
    if not path.endswith(".npy"):
        try:
            manifest = _compare_with_manifest(data)
        except UserError as error:
            faults.append(str(error))
    vocabulary, whence = vocab_size, "the vocabulary has"
    if vocabulary is None and manifest is not None and manifest.tokenizer is not None:
        vocabulary = max((end for _, end in manifest.tokenizer["ranges"]), default=0)
        whence = "the tokenizer that its manifest names has"
    pieces = _pieces(data.num_tokens, full)
    checks.append(lambda: _id_faults(data, pieces, vocabulary, whence))
    labels = find_labels(data.prefix)
    if labels is not None:
        checks.append(lambda: _label_faults(data, labels, pieces))
    for check in checks:
        faults.extend(check())
    facts = [f"{len(data)} items", f"{data.num_documents} documents", f"{data.num_tokens} tokens", data.dtype.name]
    facts.append("manifest" if manifests.manifest_path(data.prefix).exists() else "no manifest")
    facts += ["labels"] if labels is not None else []
    facts += [] if full else [f"{100 * sum(map(len, pieces)) / max(1, data.num_tokens):.3g} % of the tokens checked"]
    return Report(data.prefix, ", ".join(facts), faults)


def _compare_with_manifest(data: IndexedDataset) -> manifests.Manifest | None:
    """`manifest.verify` with the checksum of all tokens."""
    what = f"checksum of {Path(data.prefix).name}"
    with ProgressBar(what, data.num_tokens * data.dtype.itemsize, "B") as progress_bar:
        return manifests.verify(data, full=progress_bar)


def _pieces(tokens: int, full: bool) -> list[range]:
    """Ranges of tokens to check: all, or evenly spread ones with the first and the last."""
    starts = [*range(0, tokens, _PIECE)]
    if not full and tokens > _SAMPLED:
        starts = sorted({*starts[:: -(-tokens // _SAMPLED)], starts[-1]})
    return [range(start, min(tokens, start + _PIECE)) for start in starts]


def _id_faults(data: IndexedDataset, pieces: list[range], vocabulary: int | None, whence: str) -> Iterator[str]:
    if data.dtype.kind not in "iu":
        return  # rewards and the like
    signed = data.dtype.kind == "i"
    lowest = IGNORE if signed and data.prefix.removesuffix("_document").endswith("_label") else 0
    if vocabulary is None and not signed:
        return
    tokens = data.tokens
    for piece in progress(pieces, what=f"ids of {Path(data.prefix).name}", unit=f"x {_PIECE >> 20}Mi tokens"):
        part = tokens[piece.start : piece.stop]
        bad = part < lowest if vocabulary is None else (part < lowest) | (part >= vocabulary)
        if bad.any():
            at = int(np.argmax(bad))
            known = f"{whence} {vocabulary} entries" if vocabulary is not None else "ids are not negative"
            yield (
                f"{data.prefix}: token {piece.start + at} has id {int(part[at])}, but {known}; tokenise the data "
                "again, or name the tokenizer that made it."
            )
            return


def _label_faults(data: IndexedDataset, prefix: str, pieces: list[range]) -> Iterator[str]:
    """Labels have the sizes of their data, and are the tokens themselves or -100."""
    try:
        labels = IndexedDataset(prefix)
        check_labels(data, labels)
        _compare_with_manifest(labels)
    except UserError as error:
        yield f"{error} Make data and labels again together."
        return
    for piece in progress(pieces, what=f"labels of {Path(data.prefix).name}", unit=f"x {_PIECE >> 20}Mi tokens"):
        label = labels.tokens[piece.start : piece.stop].astype(np.int64)
        bad = (label != IGNORE) & (label != data.tokens[piece.start : piece.stop])
        if bad.any():
            at = int(np.argmax(bad))
            yield (
                f"{prefix}: label {piece.start + at} is {int(label[at])}, neither -100 nor the token "
                f"{int(data.tokens[piece.start + at])} of {data.prefix}; make data and labels again together."
            )
            return
