"""In which order and groups texts go through a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.inference.stage import Stage
from megatron.log import progress


def batches(stage: Stage, lengths: Sequence[int], size: int, what: str = "") -> Iterable[list[int]]:
    """Numbers of the texts with these lengths, `size` at a time: the longest first, so that texts of like length are
    padded little and a batch that does not fit into memory shows at once. Progress on rank 0 under the name `what`.
    """
    ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    return progress(found, what=what, unit="batch") if what and stage.state.rank == 0 else found
