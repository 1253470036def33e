"""One training sample, as datasets hand it to the loader, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

IGNORE = -100  # the label of a token that is not trained


@dataclass(frozen=True)
class Sample:
    """`seq_length + 1` tokens: inputs are all but the last, targets all but the first.

    Two kinds. A piece of a stream (`length` None, pack_impl packed): all tokens are real, and consecutive samples share
    one token, the last target of one and the first input of the next. A row of whole documents (`length` given, the
    other packings): after the first `length` tokens comes padding (id 0), which is never trained, never counted and a
    document of its own; and the first token of a document is not a target, as nothing before it belongs to it.

    Attributes:
        tokens: `[s + 1]` integer ids.
        starts: where documents begin, increasing positions in `[0, s + 1)`; None when the dataset does not know.
        labels: `[s + 1]`, equal to `tokens` where trained and -100 elsewhere; None trains every token.
        length: tokens of the row's documents, in `[1, s + 1]`; None for a piece of a stream.
    """

    tokens: np.ndarray
    starts: np.ndarray | None = None
    labels: np.ndarray | None = None
    length: int | None = None


@dataclass(frozen=True)
class Piece:
    """Tokens `[offset, offset + length)` of item `document` of a token file."""

    document: int
    offset: int
    length: int


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
