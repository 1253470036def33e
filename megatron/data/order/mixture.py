"""Datasets over others: a mixture in GPT-NeoX's order whose weights may change over time; a set that is read once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.data.index_builders import build_blend
from megatron.data.order.phases import Phase, Weights, lengths
from megatron.data.sample import NO_SAMPLES, Item, Provenance, SampleDataset, Wanted, untrained_like
from megatron.data.tokens.cache import Arrays, IndexCache, content_key
from megatron.errors import UserError

BLEND_VERSION = 1


def normalize_weights(weights: Sequence[float] | None, sources: int, key: str) -> list[float]:
    """Weights that add up to 1, equal ones when none are given. `key` is the YAML key, for the `UserError`."""
    if weights is None:
        weights = [1.0] * sources
    if len(weights) != sources:
        raise UserError(f"{key}: {len(weights)} weights for {sources} data paths; give one weight per path.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise UserError(f"{key}: {list(weights)} must be non-negative numbers, not all 0.")
    total = sum(float(weight) for weight in weights)
    return [float(weight) / total for weight in weights]


def weights_by_documents(documents: Sequence[int], alpha: float) -> list[float]:
    """Weights from document counts (`weight_by_num_documents`), as GPT-NeoX computes them.

    With p = (n / N)^alpha, normalised, the weight is p * (1 - n / N), normalised again: the last factor makes very
    small sources weigh a lot. A single source weighs 1.
    """
    if len(documents) == 1:
        return [1.0]
    share = np.asarray(documents, dtype=np.float64) / float(sum(documents))
    powered = share**alpha
    weights = powered / powered.sum() * (1 - share)
    return [float(weight) for weight in weights / weights.sum()]


def samples_to_ask(samples: int, weight: float) -> int:
    """Samples a source is asked for when `samples` are drawn from all: its share and half a percent more.

    The margin is GPT-NeoX's (it decides how many epochs are shuffled together). Blending never takes more than the
    share rounded up.
    """
    return math.ceil(samples * weight * 1.005)


def most_taken(samples: int, weight: float) -> int:
    """The most that blending takes of a source in `samples` draws: it owes `weight * (samples - 1)` before the last."""
    if weight <= 0 or samples <= 0:
        return 0
    return min(samples, math.floor(weight * (samples - 1) + 1e-9) + 1)


class Blend:
    """`samples` draws from sources in fixed proportions. Draw i is the same however many follow."""

    def __init__(self, weights: Weights, samples: int, cache: IndexCache) -> None:
        self.samples = samples
        # A source of weight 0 is owed nothing, but would be taken when the others are owed exactly nothing too.
        self._drawn = [d for d, weight in enumerate(weights) if weight > 0]
        self.taken = [0] * len(weights)
        self._arrays: Arrays | None = None
        if len(self._drawn) == 1:
            self.taken[self._drawn[0]] = samples
            return
        active = np.asarray([weights[d] for d in self._drawn], dtype=np.float64)
        active /= np.sum(active)  # GPT-NeoX normalises twice, and the last bit decides ties

        def build() -> Arrays:
            source, sample = build_blend(active, samples)
            taken = [np.count_nonzero(source == d) for d in range(len(active))]
            return {"source": source, "sample": sample, "taken": np.asarray(taken, dtype=np.int64)}

        key = content_key({"kind": "blend", "version": BLEND_VERSION, "samples": samples}, active)
        self._arrays = cache.arrays("blend", key, build)
        for d, taken in zip(self._drawn, self._arrays["taken"], strict=True):
            self.taken[d] = int(taken)

    def draw(self, index: int) -> tuple[int, int]:
        """The source of draw `index`, and how many draws before it were from that source."""
        if self._arrays is None:
            return self._drawn[0], index
        return self._drawn[int(self._arrays["source"][index])], int(self._arrays["sample"][index])

    def draws_of(self, source: int) -> np.ndarray:
        """The draws that are from a source, ascending."""
        if source not in self._drawn:
            return NO_SAMPLES
        if self._arrays is None:
            return np.arange(self.samples)
        return np.flatnonzero(self._arrays["source"] == self._drawn.index(source))

    def digest(self) -> str:
        """Hash of the arrays. Reads all of them."""
        described = {"drawn": self._drawn, "samples": self.samples}
        arrays = () if self._arrays is None else (self._arrays["source"], self._arrays["sample"])
        return content_key(described, *arrays)


class Mixture:
    """`samples` draws from `sources`, in the proportions of `phases`.

    Draws are counted from 0 again in every phase: a source whose weight rises, or that is new, is drawn from at its new
    rate at once, without catching up on earlier phases. Every source continues in its own order, so nothing comes twice
    before its samples are used up. A longer mixture begins with the shorter one.

    `taken`: how many samples each source gives over the whole mixture. `names` of the sources are for `locate`.
    """

    def __init__(
        self,
        sources: Sequence[SampleDataset],
        phases: Sequence[Phase],
        samples: int,
        cache: IndexCache | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        for phase in phases:
            if len(sources) != len(phase.weights):
                raise ValueError(f"{len(sources)} sources but {len(phase.weights)} weights")
        self.sources, self.samples = list(sources), samples
        self.names = list(names) if names is not None else [str(d) for d in range(len(sources))]
        self._firsts: list[int] = []
        self._blends: list[Blend] = []
        self._bases: list[list[int]] = []  # samples that each source gave before each phase
        self.taken = [0] * len(self.sources)
        for phase, length in zip(phases, lengths(phases, samples), strict=True):
            if length == 0:
                continue
            blend = Blend(phase.weights, length, cache or IndexCache(None))
            self._firsts.append(phase.first)
            self._blends.append(blend)
            self._bases.append(self.taken)
            self.taken = [before + now for before, now in zip(self.taken, blend.taken, strict=True)]
        for name, source, taken in zip(self.names, self.sources, self.taken, strict=True):
            if taken > len(source):
                raise ValueError(f"source {name} has {len(source)} samples, but {taken} are drawn from it")

    def draw(self, index: int) -> tuple[int, int]:
        """The source of draw `index`, and the number of the sample within that source."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of a mixture of {self.samples}")
        phase = bisect_right(self._firsts, index) - 1
        source, count = self._blends[phase].draw(index - self._firsts[phase])
        return source, self._bases[phase][source] + count

    def locate(self, index: int) -> Provenance:
        """The source, the number of the sample within it and its documents."""
        source, sample = self.draw(index)
        return self.sources[source].locate(sample).within(self.names[source])

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        found = [NO_SAMPLES]
        for d, source in enumerate(self.sources):
            samples = source.may_hold(wanted)
            for first, blend, bases in zip(self._firsts, self._blends, self._bases, strict=True):
                begin, end = np.searchsorted(samples, [bases[d], bases[d] + blend.taken[d]])
                if end > begin:
                    found.append(first + blend.draws_of(d)[samples[begin:end] - bases[d]])
        return np.unique(np.concatenate(found))

    def digest(self) -> str:
        """Hash of the index arrays, those of the sources included. Reads all of them."""
        sources = [source.digest() for source in self.sources]
        blends = [blend.digest() for blend in self._blends]
        return content_key({"sources": sources, "firsts": self._firsts, "blends": blends})

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Item:
        source, sample = self.draw(index)
        return self.sources[source][sample]


class ReadOnce:
    """The first `samples` samples of a source, padded with empty ones to `length`, which is a number of whole steps.

    An empty sample is all padding (`Sample.length`): never trained, never counted.
    """

    def __init__(self, source: SampleDataset, samples: int, length: int) -> None:
        if not 0 < samples <= min(length, len(source)):
            raise ValueError(f"{samples} of {len(source)} samples, padded to {length}")
        self.source, self.samples, self.length = source, samples, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        if index < self.samples:
            return self.source[index]
        like = self.source[0]
        return tuple(map(untrained_like, like)) if isinstance(like, tuple) else untrained_like(like)

    def locate(self, index: int) -> Provenance:
        """The documents of sample `index`; an empty one has none."""
        if index < self.samples:
            return self.source.locate(index)
        return Provenance(self.source.locate(0).path, index, ())

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        found = self.source.may_hold(wanted)
        return found[found < self.samples]

    def digest(self) -> str:
        return content_key({"source": self.source.digest(), "samples": self.samples, "length": self.length})
