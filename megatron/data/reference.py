"""What another model says of the tokens of samples, kept in files by the content of the samples: log-probabilities of a
reference model, the likeliest tokens of a teacher.

A store is a folder for one model. Each pass over missing rows adds two files, and a reader reads all that are there:

    NAME.rows   float32, s values for each row: log p of token i + 1 of the sample, for i from 0; of a teacher s times k
                ids of tokens, then k log-probabilities of these
    NAME.keys   8 bytes for each row, written after it: `row_key` of the sample

So a row that is read again (another epoch, another role, a run that was made longer, or in another order) is there
already, and what was written before a pass ended is not lost. Nothing in it depends on a layout.

Shapes: s inputs of a sample, k tokens of the teacher's.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron.data.sample import Item, Provenance, Sample, SampleDataset, Wanted
from megatron.errors import UserError, cannot_write

REFERENCE = "reference"
TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""The names of the extras."""
_KEYS, _ROWS = ".keys", ".rows"


_Index = tuple[np.ndarray, np.ndarray, list[np.ndarray]]
"""All keys, ascending; where their rows are, (file, row) `[keys, 2]`; the files."""


def row_key(sample: Sample) -> int:
    """64 bits that stand for what the model sees of a sample: tokens, and where documents begin and end.

    Whether there are labels is part of it (`collate.document_begins`), which tokens they train is not.
    """
    digest = hashlib.blake2b(np.ascontiguousarray(sample.tokens, dtype=np.int64), digest_size=8)
    borders = np.empty(0, np.int64) if sample.starts is None else sample.starts
    digest.update(np.asarray([*borders, sample.length or 0, sample.labels is None], dtype=np.int64))
    return int.from_bytes(digest.digest(), "little")


def row_bytes(length: int) -> int:
    """Of a row of `length` values with its key."""
    return 4 * length + 8


def rows_of(item: Item) -> tuple[Sample, ...]:
    """The samples of an item that have tokens to predict; those that fill the last batch of a set have none."""
    return tuple(one for one in (item if isinstance(item, tuple) else (item,)) if one.length != 1)


class ReferenceStore:
    """The rows in `folder`, of `length` values each: log-probabilities of a reference model. Threads may read at the
    same time."""

    names: tuple[str, ...] = (REFERENCE,)
    """Of the extras that a row holds."""

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self.length = folder, length
        self.row_bytes = row_bytes(length)
        self._lock = threading.Lock()
        self._found: _Index | None = None

    def refresh(self) -> None:
        """Look at the files again."""
        self._found = None

    def _index(self) -> _Index:
        with self._lock:
            if self._found is None:
                self._found = self._read()
            return self._found

    def _read(self) -> _Index:
        keys, places = [np.empty(0, np.uint64)], [np.empty((0, 2), np.int64)]
        files: list[np.ndarray] = []
        for path in sorted(self.folder.glob(f"*{_KEYS}")):
            found, content = np.fromfile(path, "<u8"), path.with_suffix(_ROWS)
            whole = min(len(found), content.stat().st_size // (4 * self.length))
            if whole:
                keys.append(found[:whole])
                places.append(np.stack([np.full(whole, len(files)), np.arange(whole)], axis=1))
                files.append(np.memmap(content, "<f4", "r", shape=(whole, self.length)))
        joined = np.concatenate(keys)
        order = np.argsort(joined, kind="stable")
        return joined[order], np.concatenate(places)[order], files

    def __len__(self) -> int:
        return len(self._index()[0])

    def find(self, sample: Sample) -> np.ndarray | None:
        """The row of a sample, float32 `[s]`; None when it is not there."""
        keys, places, files = self._index()
        key = np.uint64(row_key(sample))
        at = int(np.searchsorted(keys, key))
        if at == len(keys) or keys[at] != key:
            return None
        file, row = places[at].tolist()
        return files[file][row]

    def extras(self, row: np.ndarray | None, count: int) -> dict[str, np.ndarray]:
        """Of a sample of `count` tokens with this row; of one without anything to predict (None) what changes nothing.
        Each has a value per token, of the first none that is read."""
        return {REFERENCE: self._behind_first(np.zeros(count - 1) if row is None else row)}

    @staticmethod
    def _behind_first(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(values[:1]), values]).astype(np.float32, copy=False)

    def missing(self, dataset: SampleDataset, numbers: Iterable[int]) -> list[int]:
        """The items of `numbers` that have a row which is not there, and not in an item before."""
        keys, _, _ = self._index()
        known, lacking = set(keys.tolist()), []
        for number in numbers:
            new = {row_key(one) for one in rows_of(dataset[number])} - known
            if new:
                known |= new
                lacking.append(number)
        return lacking


class TeacherStore(ReferenceStore):
    """The rows of a teacher's `top_k` likeliest tokens, of samples of `length` inputs."""

    names = (TEACHER_IDS, TEACHER_LOGPROBS)

    def __init__(self, folder: Path, length: int, top_k: int) -> None:
        super().__init__(folder, 2 * length * top_k)
        self.top_k = top_k

    def extras(self, row: np.ndarray | None, count: int) -> dict[str, np.ndarray]:
        """See `ReferenceStore`: [s + 1, k] each."""
        if row is None:  # any distribution
            row = np.tile([*range(self.top_k), *[-np.log(self.top_k + 1.0)] * self.top_k], count - 1)
        parts = np.moveaxis(row.reshape(-1, 2, self.top_k), 1, 0)
        return {name: self._behind_first(part) for name, part in zip(self.names, parts, strict=True)}


class StoreWriter:
    """Adds rows to a store, in files of its own. `commit` makes them last; without it up to a few may be lost.

    Raises `MachineError` or `UserError` where they cannot be written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._rows = (folder / f"{name}{_ROWS}").open("ab")
            self._keys = (folder / f"{name}{_KEYS}").open("ab")
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> Exception:
        return cannot_write(error, f"reference log-probabilities cannot be written to {self.folder}: {error.strerror}")

    def add(self, key: int, values: np.ndarray) -> None:
        """One row, float32 of as many values as the store has."""
        try:
            self._rows.write(np.ascontiguousarray(values, dtype="<f4"))
            self._keys.write(key.to_bytes(8, "little"))
        except OSError as error:
            raise self._fault(error) from error

    def commit(self) -> None:
        """Everything is on the disk, a row before its key."""
        try:
            for file in (self._rows, self._keys):
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._fault(error) from error

    def close(self) -> None:
        self.commit()
        self._rows.close()
        self._keys.close()


class _Over:
    """A dataset like another one."""

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        return self.dataset[index]

    def locate(self, index: int) -> Provenance:
        return self.dataset.locate(index)

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        return self.dataset.may_hold(wanted)

    def digest(self) -> str:
        return self.dataset.digest()


class Selected(_Over):
    """Some items of a dataset, in the order of `numbers`, for a pass over them: every token is a target, whatever is
    trained, as the rows serve the same tokens with other labels."""

    def __init__(self, dataset: SampleDataset, numbers: Sequence[int]) -> None:
        super().__init__(dataset)
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Item:
        item = self.dataset[self.numbers[index]]
        return tuple(map(_all_targets, item)) if isinstance(item, tuple) else _all_targets(item)


def _all_targets(sample: Sample) -> Sample:
    return sample if sample.labels is None else replace(sample, labels=sample.tokens)


class WithReference(_Over):
    """A dataset whose samples have their row of a store as extras, unless they have them already."""

    def __init__(self, dataset: SampleDataset, store: ReferenceStore) -> None:
        super().__init__(dataset)
        self.store = store

    def __getitem__(self, index: int) -> Item:
        item = self.dataset[index]
        if isinstance(item, tuple):
            return tuple(self._extend(sample, index) for sample in item)
        return self._extend(item, index)

    def _extend(self, sample: Sample, index: int) -> Sample:
        if sample.extras.keys() >= set(self.store.names):
            return sample
        found = None
        if rows_of(sample):
            found = self.store.find(sample)
            if found is None:
                raise UserError(
                    f"{self.store.folder} lacks what the other model says of sample {index}. If something in it was "
                    "removed while the run was using it, start the run again."
                )
        return replace(sample, extras={**sample.extras, **self.store.extras(found, len(sample.tokens))})
