"""Resuming a killed tokenisation: the journal next to the unfinished files says up to where they are good.

Everything written is appended, so the state is a position in the input, the counts so far, and the length of each file:
`<prefix>.resume.partial`, rewritten from time to time after the data has reached the disk. The resumed command cuts the
files to those lengths, reads on from that position, and writes the bytes that an uninterrupted one would have written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron.data.tokenise.chunks import Chunk, Position
from megatron.data.tokenise.formats import START
from megatron.data.tokens.builder import IndexedDatasetBuilder, Mark
from megatron.data.tokens.indexed import HEADER
from megatron.data.tokens.partial import PARTIAL, WriteError
from megatron.errors import UserError
from megatron.files import from_json, read_json

T = TypeVar("T")
_RESTART = "--restart starts from zero"
VERSION = 2  # 2: marks hold the checksum of what is written


@dataclass(frozen=True)
class Saved:
    """A journal's content. `complete`: all input was read; only renaming the files may be left to do."""

    position: Position
    counts: Mapping[str, Any]
    marks: Sequence[Mark]
    complete: bool


class Journal:
    """The journal of the datasets called `prefix` + a suffix each.

    Args:
        prefix: as the datasets'.
        identity: what the result depends on (files, options, tokenizer), by a name for messages; JSON-able. Only what
            was written with the same identity is resumed.
        every: seconds between two saves; 0: never save, so nothing can be resumed.
        restart: discard what an earlier command left.

    Raises `UserError` when this command cannot resume what an earlier one left.
    """

    def __init__(self, prefix: str, identity: Mapping[str, Any], every: float, *, restart: bool = False) -> None:
        self.prefix, self.path = prefix, Path(f"{prefix}.resume{PARTIAL}")
        self._new = Path(f"{prefix}.resume.new{PARTIAL}")
        self._identity = {name: digest(value) for name, value in identity.items()}
        self._every, self._last = every, time.monotonic()
        self._ends: deque[Position] = deque()
        if restart:
            self.remove()
        self.saved = self._read()

    @property
    def start(self) -> Position:
        """Where to read from."""
        return self.saved.position if self.saved else START

    def read_counts(self, kind: type[T]) -> T:
        """The counts of the earlier command, as the dataclass that `advance` was given."""
        assert self.saved is not None
        try:
            return from_json(kind, self.saved.counts)
        except ValueError as error:
            raise self._refuse(error) from error

    def watch(self, cuts: Iterable[tuple[Chunk, Position]]) -> Iterator[Chunk]:
        """The chunks, remembering where each ends; none when the earlier command had read all."""
        if self.saved and self.saved.complete:
            return
        for chunk, after in cuts:
            self._ends.append(after)
            yield chunk

    def builder(self, index: int, prefix: str, dtype: np.dtype) -> IndexedDatasetBuilder:
        """The builder of output `index`, resumed where the earlier command stopped."""
        if self.saved is None:
            return IndexedDatasetBuilder(prefix, dtype)
        mark = self.saved.marks[index]
        if self.saved.complete:
            _undo_renaming(prefix, mark, dtype)
        return IndexedDatasetBuilder(prefix, dtype, resume=mark)

    def advance(self, counts: Any, builders: Sequence[IndexedDatasetBuilder]) -> None:
        """Note that one more chunk is written, with the totals (a dataclass); save when it is time to."""
        position = self._ends.popleft()
        if self._every > 0 and builders and time.monotonic() - self._last >= self._every:
            self._save(position, counts, builders, complete=False)

    def complete(self, counts: Any, builders: Sequence[IndexedDatasetBuilder]) -> None:
        """Note that all is written and only the renaming is left, so that all datasets get their names or none."""
        if self.saved is not None or (self._every > 0 and len(builders) > 1):
            self._save(self.start, counts, builders, complete=True)

    def remove(self) -> None:
        """Delete the journal: the work is done, or will not be resumed."""
        self.path.unlink(missing_ok=True)
        self._new.unlink(missing_ok=True)  # of a process killed while it saved
        self.saved = None

    def _save(self, position: Position, counts: Any, builders: Sequence[IndexedDatasetBuilder], complete: bool) -> None:
        marks = [builder.mark() for builder in builders]
        saved = Saved(position, asdict(counts), marks, complete)
        try:
            with self._new.open("w", encoding="utf-8") as file:
                json.dump({"version": VERSION, "identity": self._identity, **asdict(saved)}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._new, self.path)
        except OSError as error:
            self._new.unlink(missing_ok=True)
            raise WriteError(f"cannot write {self.path}: {error.strerror or error}.") from error
        self.saved, self._last = saved, time.monotonic()

    def _read(self) -> Saved | None:
        if not self.path.exists():
            return None
        try:
            raw = read_json(self.path, _RESTART)
            if raw["version"] != VERSION:
                raise UserError(f"{self.path}: written by another version of Deepy; --restart starts from zero")
            identity = raw["identity"]
            changed = [
                name for name in {**identity, **self._identity} if identity.get(name) != self._identity.get(name)
            ]
            saved = from_json(Saved, {key: raw[key] for key in ("position", "counts", "marks", "complete")})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refuse(error) from error
        if changed:
            raise UserError(
                f"{self.path}: an earlier command did not finish, and this one differs in {' and '.join(changed)}. "
                "Run the earlier command again to resume it, or give --restart to start from zero"
            )
        return saved

    def _refuse(self, error: Exception) -> UserError:
        return UserError(f"{self.path}: not a valid journal ({error!r}). {_RESTART}")


def digest(value: Any) -> str:
    """A fingerprint of JSON-able values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _undo_renaming(prefix: str, mark: Mark, dtype: np.dtype) -> None:
    """Give files that were renamed before the command was killed their `.partial` names again."""
    for end, size in ((".bin", mark.tokens * dtype.itemsize), (".idx", HEADER.size + 12 * mark.items)):
        final, partial = Path(prefix + end), Path(f"{prefix}{end}{PARTIAL}")
        # The index is larger: it has more than the lengths.
        if not partial.exists() and final.exists() and final.stat().st_size >= size:
            os.replace(final, partial)
