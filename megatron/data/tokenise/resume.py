"""Taking up a tokenisation that was killed: the journal beside the unfinished files says how far they are good.

Everything written is appended, so the state of a run is a position in the input, the counts so far, and how long each
file was: `<prefix>.resume.partial`, renewed every so often after the data has reached the disk. A later run cuts the
files back to those lengths and reads on from that position, and so writes the bytes an uninterrupted one would have.
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
from typing import Any

import numpy as np

from megatron.data.tokenise.chunks import Chunk, Position
from megatron.data.tokenise.formats import START
from megatron.data.tokens.builder import IndexedDatasetBuilder, Mark
from megatron.data.tokens.indexed import HEADER
from megatron.data.tokens.partial import PARTIAL, WriteError
from megatron.errors import UserError

VERSION = 1


@dataclass(frozen=True)
class Saved:
    """What a journal holds. `complete`: the whole input was read, and only the last step, the renaming, may lack."""

    position: Position
    counts: Mapping[str, Any]
    marks: Sequence[Mark]
    complete: bool


class Journal:
    """The journal of the datasets called `prefix` + a suffix each.

    Args:
        prefix: as the datasets'.
        identity: whatever the result depends on (files, options, tokenizer), by a name for messages; JSON-able. What
            was written under another identity is not continued.
        every: seconds between two saves; 0 for none, and then nothing can be taken up.
        restart: forget what an earlier run left.

    Raises `UserError` when an earlier run cannot be continued by this one.
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

    def watch(self, cuts: Iterable[tuple[Chunk, Position]]) -> Iterator[Chunk]:
        """The chunks, remembering where each ends. Nothing when the earlier run had read all."""
        if self.saved and self.saved.complete:
            return
        for chunk, after in cuts:
            self._ends.append(after)
            yield chunk

    def builder(self, index: int, prefix: str, dtype: np.dtype) -> IndexedDatasetBuilder:
        """The builder of output `index`, with what the earlier run wrote."""
        if self.saved is None:
            return IndexedDatasetBuilder(prefix, dtype)
        mark = self.saved.marks[index]
        if self.saved.complete:
            _take_back(prefix, mark, dtype)
        return IndexedDatasetBuilder(prefix, dtype, resume=mark)

    def advance(self, counts: Any, builders: Sequence[IndexedDatasetBuilder]) -> None:
        """One more chunk is written; `counts` (a dataclass) are the totals. Saves when it is time to."""
        position = self._ends.popleft()
        if self._every > 0 and builders and time.monotonic() - self._last >= self._every:
            self._save(position, counts, builders, complete=False)

    def complete(self, counts: Any, builders: Sequence[IndexedDatasetBuilder]) -> None:
        """All is written; only the renaming is left, which is not to leave some datasets without the others."""
        if self.saved is not None or (self._every > 0 and len(builders) > 1):
            self._save(self.start, counts, builders, complete=True)

    def remove(self) -> None:
        """The work is done, or not to be continued."""
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
            raw = json.loads(self.path.read_text(encoding="utf-8"))
            if raw["version"] != VERSION:
                raise UserError(f"{self.path}: of another version of this program; --restart begins anew")
            changed = [
                name for name in {**raw["identity"], **self._identity} if not self._agrees(raw["identity"], name)
            ]
            marks = [Mark(**mark) for mark in raw["marks"]]
            saved = Saved(Position(**raw["position"]), raw["counts"], marks, raw["complete"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self.path}: cannot be understood ({error!r}); --restart begins anew") from error
        if changed:
            raise UserError(
                f"{self.path}: an earlier run did not finish, and this one differs from it in {' and '.join(changed)}: "
                "run it as it was to continue it, or give --restart to begin anew"
            )
        return saved

    def _agrees(self, earlier: Mapping[str, str], name: str) -> bool:
        return earlier.get(name) == self._identity.get(name)


def digest(value: Any) -> str:
    """A fingerprint of JSON-able values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _take_back(prefix: str, mark: Mark, dtype: np.dtype) -> None:
    """Give files that a complete run renamed before it was killed their unfinished names again."""
    for end, size in ((".bin", mark.tokens * dtype.itemsize), (".idx", HEADER.size + 12 * mark.items)):
        final, partial = Path(prefix + end), Path(f"{prefix}{end}{PARTIAL}")
        if (
            not partial.exists() and final.exists() and final.stat().st_size >= size
        ):  # the index has more, after the lengths
            os.replace(final, partial)
