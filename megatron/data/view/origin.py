"""Where the samples of a run come from (files, documents, offsets), and which samples a document is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.order.role_order import RoleOrder
from megatron.data.order.sources import Source
from megatron.data.packing.samples import in_range
from megatron.data.sample import Provenance, SampleDataset
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import UserError, nearest


@dataclass(frozen=True)
class OriginPiece:
    """Tokens `[offset, offset + length)` of document `document` of a file, which has `size` tokens."""

    file: str
    document: int
    offset: int
    length: int
    size: int


@dataclass(frozen=True)
class Origin:
    """Where a sample comes from.

    Attributes:
        source: name of the source; names of mixtures within mixtures are joined by `/`.
        prefix: its data path.
        sample: number of the sample in the order of the source.
        pieces: its documents in reading order; each has its own file where a data path is a pattern.
    """

    source: str
    prefix: str
    sample: int
    pieces: tuple[OriginPiece, ...]

    @property
    def description(self) -> str:
        """In words."""
        return f"{self.source} ({self.prefix}, sample {self.sample} of its order)"

    def record(self) -> dict[str, Any]:
        """A JSON-able form."""
        return asdict(self)


def origin_of(role: RoleOrder, dataset: SampleDataset, index: int) -> Origin:
    """Where sample `index` of a role comes from."""
    found = dataset.locate(index)
    source = source_of(role, found)
    pieces = []
    for piece in found.pieces:
        side = source.data.sides[piece.side]
        file, document = file_of(side, piece.document)
        size = int(side.sizes[piece.document])
        pieces.append(OriginPiece(file, document, piece.offset, piece.length, size))
    name = "/".join(found.path[:-1]) or source.name
    return Origin(name, str(source.data.prefix), found.sample, tuple(pieces))


def source_of(role: RoleOrder, found: Provenance) -> Source:
    """The source of a provenance, by name and file."""
    fitting = [one.source for one in role.sources if str(one.source.data.prefix) == str(found.path[-1])]
    return next((one for one in fitting if one.name in found.path[:-1]), fitting[0])


def file_of(data: IndexedDataset, document: int) -> tuple[str, int]:
    """The file that holds an item, and the item's number there. They differ where a data path is a pattern."""
    for part in data.parts:
        if document < len(part):
            return str(part.prefix), document
        document -= len(part)
    raise IndexError(f"{data.prefix}: item {document} beyond the end")


def samples_with(
    role: RoleOrder, dataset: SampleDataset, numbers: Sequence[int], file: str, documents: range
) -> Iterator[int]:
    """Those of `numbers` (a range of step 1, or a list) whose samples have one of the documents of a file; ascending.

    `file` may be the name of a source. Raises `UserError` when the role reads no such file.
    """
    wanted = _find_items(role, file, documents)
    likely = dataset.may_hold(wanted)
    asked = in_range(likely, numbers) if isinstance(numbers, range) else np.isin(likely, numbers)
    for index in likely[asked].tolist():
        found = dataset.locate(index)
        items = wanted.get(str(found.path[-1]))
        if items is not None and any(piece.document in items for piece in found.pieces):
            yield index


def _find_items(role: RoleOrder, file: str, documents: range) -> dict[str, range]:
    """The documents as items of every data path that has the file."""
    wanted, known = {}, []
    for planned in role.sources:
        data = planned.source.data
        for side in data.sides:
            before = 0
            for part in side.parts:
                known.append(str(part.prefix))
                if _same(file, str(part.prefix)) or (len(side.parts) == 1 and file == planned.source.name):
                    if documents.stop > len(part) or documents.start < 0:
                        raise UserError(f"{part.prefix} has documents 0..{len(part) - 1}, not {documents.stop - 1}.")
                    wanted[str(data.prefix)] = range(before + documents.start, before + documents.stop)
                before += len(part)
    if not wanted:
        names = [planned.source.name for planned in role.sources]
        raise UserError(
            f"the run reads no {file}.{nearest(file, known + names)} It reads: {', '.join(known[:8])}"
            + (", ..." if len(known) > 8 else "")
        )
    return wanted


def _same(one: str, other: str) -> bool:
    def plain(path: str) -> Path:
        return Path(path.removesuffix(".bin").removesuffix(".idx")).expanduser().resolve()

    return plain(one) == plain(other)
