"""From documents to samples: one file per `pack_impl`.

packing = PACKINGS[pack_impl](data, seq_length=..., documents=..., labels=..., allow_chopped=..., cache=...)
packing.samples_per_epoch()                          # before any index array is built
segments = packing.segments(samples, seed, kept)     # stored in checkpoints, passed as `kept` on resume
dataset = packing.dataset(segments)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import IndexCache
from megatron.data.tokens.indexed import IndexedDataset
from megatron.registry import Registry, import_entries


@dataclass(frozen=True)
class Segment:
    """A part of the sample order that is decided once and kept: `samples` of them, drawn with `seed`.

    `epochs` are the whole passes over the documents that the samples are drawn from; 0 for packings that continue from
    pass to pass without counting them.
    """

    epochs: int
    samples: int
    seed: int


def count_samples(segments: Sequence[Segment]) -> int:
    return sum(segment.samples for segment in segments)


class Packing(ABC):
    """The documents of one source and the way they are packed. Torch-free; nothing is built before `dataset`.

    Args:
        data: the tokens; every item counts as a document. Of pairs (`Pairs`) every pair does.
        seq_length: inputs per sample; a sample holds one token more.
        documents: half-open range of items to use, all by default.
        labels: dataset of equal item sizes whose -100 marks tokens that are not trained.
        allow_chopped: documents of more than seq_length + 1 tokens are cut (true) or left out (false).
        cache: where index arrays are stored, and what is found by reading labels or counting samples.
        rewards: one number for each document, or pair.
        references: log-probabilities of the tokens of each document from the second on.

    `rows`: how many a sample has; 2 where each text of a pair has a row of its own.
    """

    rows = 1

    def __init__(
        self,
        data: IndexedDataset,
        *,
        seq_length: int,
        documents: tuple[int, int] | None = None,
        labels: IndexedDataset | None = None,
        allow_chopped: bool = True,
        cache: IndexCache | None = None,
        rewards: IndexedDataset | None = None,
        references: IndexedDataset | None = None,
    ) -> None:
        self.data, self.labels, self.seq_length = data, labels, seq_length
        self.rewards, self.references = rewards, references
        self.documents = documents or (0, len(data))
        self.allow_chopped = allow_chopped
        self.cache, self.name = cache or IndexCache(None), Path(data.prefix).name

    @property
    def capacity(self) -> int:
        """Tokens of a sample."""
        return self.seq_length + 1

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each document in the range: int32 `[documents]`; of pairs, those of both texts."""
        first, end = self.documents
        return self.data.sizes[first:end]

    @property
    def compares(self) -> bool:
        """Whether documents are answers that are compared as wholes: pairs, or documents with a reward."""
        return len(self.data.sides) > 1 or self.rewards is not None

    @property
    @abstractmethod
    def key(self) -> str:
        """Hash of what the order of samples depends on besides the segments."""

    @abstractmethod
    def samples_per_epoch(self, epochs: int = 1) -> int:
        """Samples in `epochs` passes over the documents: what `train_epochs` is counted in."""

    def epochs(self, samples: int) -> float:
        """Passes over the documents that `samples` samples are."""
        return samples / max(self.samples_per_epoch(), 1)

    def notes(self) -> list[str]:
        """What to log about these documents in this packing: skipped and cut ones, padding."""
        return []

    def segments(
        self, samples: int, seed: int, kept: Sequence[Segment] = (), what: str = "the data"
    ) -> tuple[Segment, ...]:
        """The segments that give at least `samples` samples: the `kept` ones, and one more if they are too few.

        The first segment has GPT-NeoX's seed; later ones only have to differ. Raises `UserError` naming `what` when the
        documents give no sample at all.
        """
        self.check_usable(what)
        missing = samples - count_samples(kept)
        if kept and missing <= 0:
            return tuple(kept)
        return (*kept, self.segment(max(missing, 1), (seed + 7919 * len(kept)) % 2**32))

    @abstractmethod
    def check_usable(self, what: str) -> None:
        """Raise `UserError` naming `what` when the documents give no sample."""

    @abstractmethod
    def segment(self, samples: int, seed: int) -> Segment:
        """A segment of at least `samples` samples, one or more."""

    @abstractmethod
    def dataset(self, segments: Sequence[Segment]) -> SampleDataset:
        """The samples of some segments; index arrays are built, or found in the cache."""


PACKINGS: Registry[type[Packing]] = Registry(
    "pack_impl",
    fields=("answers",),
    wants="a subclass of megatron.data.packing.Packing",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Packing),
)
"""Packings, subclasses of `Packing`; documentation/packing.md says which to use.

`answers`: how texts that are compared (pairs, texts with a reward) lie in rows: `apart`, each in one of its own, or
`joined`, several in one. Without it a packing cannot hold them.
"""

import_entries(__name__, __path__)
