"""Several sources drawn from in given proportions, in GPT-NeoX's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megatron.data.cache import IndexCache, content_key
from megatron.data.index_builders import build_blend
from megatron.errors import UserError

BLEND_VERSION = 1


class SampleSource(Protocol):
    """What can be drawn from: `len` samples, each read by its number; `digest` is a hash of their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def digest(self) -> str: ...


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


class Mixture:
    """`samples` draws from `sources` in the proportions `weights` (adding up to 1).

    Draw i is the same however many follow, so a longer mixture continues a shorter one. Indices outside raise
    `IndexError`; nothing wraps around. `taken` says how many samples each source gives over the whole mixture.
    """

    def __init__(
        self, sources: Sequence[SampleSource], weights: Sequence[float], samples: int, cache: IndexCache | None = None
    ) -> None:
        if len(sources) != len(weights):
            raise ValueError(f"{len(sources)} sources but {len(weights)} weights")
        self.sources, self.weights, self.samples = list(sources), list(weights), samples
        # A source of weight 0 is owed nothing, but would be taken when the others are owed exactly nothing too.
        self._drawn = [d for d, weight in enumerate(weights) if weight > 0]
        active = np.asarray([weights[d] for d in self._drawn], dtype=np.float64)
        active /= np.sum(active)  # GPT-NeoX normalises twice, and the last bit decides ties

        def build() -> dict[str, np.ndarray]:
            source, sample = build_blend(active, samples)
            taken = [np.count_nonzero(source == d) for d in range(len(active))]
            return {"source": source, "sample": sample, "taken": np.asarray(taken, dtype=np.int64)}

        key = content_key({"kind": "blend", "version": BLEND_VERSION, "samples": samples}, active)
        arrays = (cache or IndexCache(None)).arrays("blend", key, build)
        self._source, self._sample = arrays["source"], arrays["sample"]
        self.taken = [0] * len(self.sources)
        for d, taken in zip(self._drawn, arrays["taken"], strict=True):
            self.taken[d] = int(taken)
            if taken > len(self.sources[d]):
                raise ValueError(f"source {d} has {len(self.sources[d])} samples, but {taken} are drawn from it")

    def locate(self, index: int) -> tuple[int, int]:
        """The source of draw `index`, and the number of the sample within that source."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of a mixture of {self.samples}")
        return self._drawn[int(self._source[index])], int(self._sample[index])

    def digest(self) -> str:
        """Hash of the index arrays, those of the sources included. Reads all of them."""
        sources = [source.digest() for source in self.sources]
        return content_key({"sources": sources, "weights": self.weights}, self._source, self._sample)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        source, sample = self.locate(index)
        return self.sources[source][sample]
