"""One training sample, the datasets that give samples by number, and where a sample came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

IGNORE = -100  # the label of a token that is not trained
NO_SAMPLES = np.empty(0, dtype=np.int64)

Wanted = Mapping[str, range]
"""Documents to look for: a range of items for the prefix of each token file."""


@dataclass(frozen=True)
class Sample:
    """`seq_length + 1` tokens: inputs are all but the last, targets all but the first.

    Two kinds. Part of a stream (`length` None, `pack_impl: packed`): all tokens are real, and consecutive samples share
    one token, the last target of one and the first input of the next. Whole documents (`length` given, the other
    packings): after the first `length` tokens comes padding (id 0), which is never trained, never counted and a
    document of its own; and the first token of a document is not a target, as nothing before it belongs to it.

    Attributes:
        tokens: `[s + 1]` integer ids.
        starts: where documents begin, increasing positions in `[0, s + 1)`; None when the dataset does not know.
        labels: `[s + 1]`, equal to `tokens` where trained and -100 elsewhere; None trains every token.
        length: tokens of the documents, in `[1, s + 1]`; None for part of a stream.
        answers: int `[s + 1]`, the number, counted from 0, of the answer that each token belongs to; -1 = none. What is
            trained of an answer `labels` say, so its prompt may have its number. An answer has a token behind the
            first, and answers 2i and 2i + 1 are a pair, where there are pairs. None: the sample is one answer.
        extras: float, by name: per token `[s + 1]`, or per answer.
    """

    tokens: np.ndarray
    starts: np.ndarray | None = None
    labels: np.ndarray | None = None
    length: int | None = None
    answers: np.ndarray | None = None
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


Item = Sample | tuple[Sample, ...]


def untrained_like(sample: Sample) -> Sample:
    """A sample of the same shape that is all padding."""
    labels = None if sample.labels is None else np.full_like(sample.labels, IGNORE)
    extras = {name: np.zeros_like(values) for name, values in sample.extras.items()}
    start = np.zeros(1, dtype=np.int64)
    return replace(sample, tokens=np.zeros_like(sample.tokens), starts=start, labels=labels, length=1, extras=extras)


@dataclass(frozen=True)
class Piece:
    """Tokens `[offset, offset + length)` of item `document` of a token file; of pairs, of the chosen text (`side` 0) or
    the rejected one (1)."""

    document: int
    offset: int
    length: int
    side: int = 0


@dataclass(frozen=True)
class Provenance:
    """Where a sample came from.

    Attributes:
        path: names from the outermost mixture to the source; the last is the prefix of the token file.
        sample: its number in the order of that source.
        pieces: the documents in it, in reading order; their lengths add up to the real tokens of the sample.
    """

    path: tuple[str, ...]
    sample: int
    pieces: tuple[Piece, ...]

    def within(self, name: str) -> Provenance:
        """The same, seen from a mixture called `name`."""
        return replace(self, path=(name, *self.path))


class SampleDataset(Protocol):
    """Samples in their order. An index outside `[0, len)` raises `IndexError`; nothing wraps around.

    Of unpacked pairs an item is two samples, (chosen, rejected), which are two rows of a batch and stay together.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item: ...

    def locate(self, index: int) -> Provenance:
        """The documents that sample `index` is made of."""
        ...

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        """Numbers of the samples that may hold some documents, int64, ascending: all that do, and few that do not."""
        ...

    def digest(self) -> str:
        """Hash of the index arrays, for ranks to compare what they built. Reads all of them."""
        ...
