"""What large data costs: memory of building, memory of reading, and the way to any sample."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.order.datasets import build_datasets
from megatron.data.packing import Segment
from megatron.data.packing.packed import packed_index
from megatron.data.tokens.indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset
from megatron.neox_arguments.schema_data import DataConfig
from tests.data.corpus import write

pytestmark = pytest.mark.cpu


def sparse(prefix: Path, documents: int, longest: int) -> int:
    """A dataset whose tokens are zeros that take no space; returns their number."""
    sizes = np.random.default_rng(0).integers(1, longest, documents).astype("<i4")
    ends = np.cumsum(sizes, dtype=np.int64) * 2
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype("<u2")], documents, documents + 1))
        for part in (sizes, ends - sizes * 2, np.arange(documents + 1)):
            file.write(part)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(ends[-1]))
    return int(ends[-1]) // 2


def test_building_takes_little_more_memory_than_the_arrays() -> None:
    sizes = np.random.default_rng(0).integers(1, 2000, 1_000_000).astype(np.int32)
    segment = Segment(1, int(sizes.sum() - 1) // 2048, 1)
    tracemalloc.start()
    arrays = packed_index(sizes, (0, len(sizes)), 2048, segment)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * sum(array.nbytes for array in arrays.values())


def test_the_last_sample_needs_none_of_those_before(tmp_path: Path) -> None:
    """Opening a prepared run and reading at its end: memory for a batch, not for the index or what was consumed."""
    tokens = sparse(tmp_path / "x", 1_000_000, 2000)
    config = DataConfig(data_path=str(tmp_path / "x"), split="1")
    counts = {"seq_length": 2048, "seed": 1, "train_samples": tokens // 2048 - 1}
    index = sum(size.bytes for size in build_datasets(config, **counts).plan.caches.entries)
    tracemalloc.start()
    dataset = build_datasets(config, **counts).train
    assert dataset is not None
    loader = StepLoader(dataset, micro_batch=4, gas=1, rules=CollateRules(2048, eod=1, vocab_size=8))
    batch = next(loader.steps((loader.num_steps() - 1) * 4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.tokens.shape == (1, 4, 2048)
    assert index > 6_000_000 and peak < 1_500_000


@pytest.mark.slow
def test_reading_100_000_samples_keeps_nothing(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[5] * 40 for _ in range(500)]))
    config = DataConfig(data_path=data.prefix, split="1")
    dataset = build_datasets(config, seq_length=8, seed=1, train_samples=100_000).train
    assert dataset is not None
    loader = StepLoader(dataset, micro_batch=250, gas=2, rules=CollateRules(8, eod=1, vocab_size=8), num_workers=2)
    held = []
    tracemalloc.start()
    for k, _ in enumerate(loader.steps()):
        if k in (20, 190):
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[1] - held[0] < 500_000  # a batch is 100 kB, and a few are read ahead
