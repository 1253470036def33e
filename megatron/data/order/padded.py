"""A dataset read once and no further: whole steps need full batches, and nothing may count twice."""

from __future__ import annotations

import numpy as np

from megatron.data.order.mixture import SampleSource
from megatron.data.packing.holding import Wanted
from megatron.data.sample import IGNORE, Provenance, Sample
from megatron.data.tokens.cache import content_key


class Padded:
    """The first `samples` samples of a source, then as many empty ones as make it `length` long.

    An empty sample is all padding (`Sample.length`): never trained, never counted.
    """

    def __init__(self, source: SampleSource, samples: int, length: int) -> None:
        if not 0 < samples <= min(length, len(source)):
            raise ValueError(f"{samples} of {len(source)} samples, padded to {length}")
        self.source, self.samples, self.length = source, samples, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        if index < self.samples:
            return self.source[index]
        like: Sample = self.source[0]
        tokens = np.zeros_like(like.tokens)
        labels = None if like.labels is None else np.full_like(like.labels, IGNORE)
        return Sample(tokens, np.zeros(1, dtype=np.int64), labels, length=1)

    def locate(self, index: int) -> Provenance:
        """The documents of sample `index`; an empty one has none."""
        if index < self.samples:
            return self.source.locate(index)
        return Provenance(self.source.locate(0).path, index, ())

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        """Samples that may hold some documents."""
        found = self.source.may_hold(wanted)
        return found[found < self.samples]

    def digest(self) -> str:
        return content_key({"source": self.source.digest(), "samples": self.samples, "length": self.length})
