"""What every `pack_impl` offers: it is bound to the documents of one source and says how they become samples.

    packing = PACKINGS[pack_impl](data, seq_length=..., documents=..., labels=..., allow_chopped=..., cache=...)
    packing.samples_per_epoch()                      # before any index array is built
    segments = packing.plan(samples, seed, frozen)   # goes into the run's state, comes back as `frozen`
    dataset = packing.dataset(segments, cache, name)

`PACKINGS` is in packings.py; each packing is in a file of its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron.data.packing.holding import Wanted
from megatron.data.sample import Provenance, Sample
from megatron.data.tokens.cache import IndexCache
from megatron.data.tokens.indexed import IndexedDataset


@dataclass(frozen=True)
class Segment:
    """A part of the sample order that is fixed once and kept: `samples` of them, drawn with `seed`.

    `epochs` are the whole passes over the documents that the samples are drawn from; packings that go on from pass to
    pass without planning them write 0.
    """

    epochs: int
    samples: int
    seed: int


def fresh_seed(seed: int, segments: int) -> int:
    """The seed of the segment after `segments` others: the first is GPT-NeoX's, later ones only have to differ."""
    return (seed + 7919 * segments) % 2**32


class PackedSource(Protocol):
    """The samples that a packing makes, in their order: an index outside `[0, len)` raises `IndexError`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def locate(self, index: int) -> Provenance: ...

    def may_hold(self, wanted: Wanted) -> np.ndarray: ...

    def digest(self) -> str: ...


class Packing(ABC):
    """The documents of one source and the way they are packed. Torch-free; nothing is built before `dataset`.

    Args:
        data: the tokens; every item counts as a document.
        seq_length: inputs per sample; a sample holds one token more.
        documents: half-open range of items to use, all by default.
        labels: dataset of equal item sizes whose -100 marks tokens that are not trained.
        allow_chopped: documents of more than seq_length + 1 tokens are cut (true) or left out (false).
        cache: where what has to be found out about the labels is kept.
    """

    def __init__(
        self,
        data: IndexedDataset,
        *,
        seq_length: int,
        documents: tuple[int, int] | None = None,
        labels: IndexedDataset | None = None,
        allow_chopped: bool = True,
        cache: IndexCache | None = None,
    ) -> None:
        self.data, self.labels, self.seq_length = data, labels, seq_length
        self.documents = documents or (0, len(data))
        self.allow_chopped = allow_chopped
        self.cache = cache or IndexCache(None)

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
        """What people should know about these documents in this packing: skipped and cut ones, padding. For the log."""
        return []

    @abstractmethod
    def plan(
        self, samples: int, seed: int, frozen: Sequence[Segment] = (), what: str = "the data"
    ) -> tuple[Segment, ...]:
        """The segments that give at least `samples` samples: the `frozen` ones, and one more if they are too few.

        Raises `UserError` naming `what` when the documents give no sample at all.
        """

    @abstractmethod
    def dataset(self, segments: Sequence[Segment], cache: IndexCache | None = None, name: str = "data") -> PackedSource:
        """The samples of some segments; index arrays are made, or found in `cache` under `name`."""
