"""The loading part of tools/bench/data.py: tokens per second of every packing, compared with what a model on this CPU
consumes, memory over many samples, and the time to the first sample of a resumed run on a huge index.

The datasets are synthetic; the tokens of the huge one are a sparse file of zeros.
"""

from __future__ import annotations

import resource
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.order.datasets import build_datasets
from megatron.data.packing import PACKINGS
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset
from megatron.neox_arguments.schema_data import DataConfig

T = TypeVar("T")
VOCABULARY = 50257


def measure(call: Callable[[], T]) -> tuple[T, float, float]:
    """What a call gives, its wall and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def resident_mb() -> float:
    """Most memory this process held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bench_packings(samples: int, seq: int) -> None:
    """Whole steps of 4 x 8 samples from each packing, and their ratio to a 10M-parameter model's training."""
    eaten = model_speed(seq)
    print(f"\nLoader: steps of 4 x 8 samples of {seq}; a 10M-parameter model trains at {eaten:,.0f} tokens/s here")
    print(f"  {'':52} {'M tokens/s':>11} {'per CPU s':>10} {'x model':>8} {'resumed ms':>11}")
    with tempfile.TemporaryDirectory() as folder:
        data = small_dataset(f"{folder}/x", samples * seq)
        for name in PACKINGS:
            packing = PACKINGS[name](data, seq_length=seq)
            dataset = packing.dataset(packing.segments(samples, 1))
            for workers, masking in ((0, False), (0, True), (2, False)):
                rules = CollateRules(seq, eod=0, intra_document_masking=masking, vocab_size=VOCABULARY)
                loader = StepLoader(dataset, micro_batch=8, gas=4, rules=rules, num_workers=workers)
                steps = min(loader.num_steps(), 400)

                def run(loader: StepLoader = loader, steps: int = steps) -> int:
                    taken = zip(range(steps), loader.steps(), strict=False)
                    return sum(batch.tokens.numel() for _, batch in taken)

                tokens, wall, cpu = measure(run)
                _, resumed, _ = measure(lambda loader=loader: next(loader.steps((loader.num_steps() - 1) * 32)))
                what = f"{name}, {workers} workers{', intra_document_masking' if masking else ''}"
                print(
                    f"  {what:52} {tokens / wall / 1e6:11.1f} {tokens / cpu / 1e6:10.1f} {tokens / wall / eaten:8.0f} "
                    f"{resumed * 1e3:11.1f}"
                )


def bench_growth(samples: int, seq: int = 512) -> None:
    """What is still allocated after a tenth of the samples and after all of them."""
    with tempfile.TemporaryDirectory() as folder:
        data = small_dataset(f"{folder}/x", samples * seq)
        packing = PACKINGS["packed"](data, seq_length=seq)
        dataset = packing.dataset(packing.segments(samples, 1))
        rules = CollateRules(seq, eod=0, intra_document_masking=True, vocab_size=VOCABULARY)
        loader = StepLoader(dataset, micro_batch=8, gas=4, rules=rules, num_workers=2)
        steps, held = loader.num_steps(), []
        tracemalloc.start()
        for k, _ in enumerate(loader.steps()):
            if k in (steps // 10, steps - 8):
                held.append(tracemalloc.get_traced_memory()[0] / 1e6)
        tracemalloc.stop()
    early, late = (f"{number:,} samples" for number in (steps // 10 * 32, steps * 32))
    print(f"\nGrowth: allocated after {early} {held[0]:.2f} MB, after {late} {held[1]:.2f} MB")


def bench_resume(documents: int, tokens: int, seq: int) -> None:
    """From a config to the first batch: the index built, then found; the next sample at any position."""
    print(f"\nHuge index: {tokens:.3g} tokens in {documents:.3g} documents, from the config to a batch of 32 x {seq}")
    with tempfile.TemporaryDirectory() as folder:
        huge_dataset(f"{folder}/x", documents, tokens)
        wanted = int(0.99 * tokens) // seq
        config = DataConfig(data_path=f"{folder}/x", split="1")

        def start() -> StepLoader:
            found = build_datasets(config, seq_length=seq, seed=1, train_samples=wanted).train
            assert found is not None
            return StepLoader(found, micro_batch=8, gas=4, rules=CollateRules(seq, eod=1, vocab_size=VOCABULARY))

        for what, position in (("build, begin", 0), ("found, begin", 0), ("found, middle", 0.5), ("found, end", 1.0)):
            loader, wall, cpu = measure(start)
            at = int(position * (loader.num_steps() - 1)) * 32
            _, first, first_cpu = measure(lambda loader=loader, at=at: next(loader.steps(at)))
            print(
                f"  {what:14} open {wall:7.2f} s ({cpu:6.2f} CPU)   first batch {first * 1e3:8.1f} ms "
                f"({first_cpu * 1e3:6.1f} CPU)   most memory {resident_mb():7.0f} MB"
            )
        size = sum(file.stat().st_size for file in Path(folder, "index_cache").rglob("*.npy"))
        print(f"  index on disk {size / 1e6:.0f} MB")


def small_dataset(prefix: str, tokens: int) -> IndexedDataset:
    """Documents of 500 tokens on average."""
    rng = np.random.RandomState(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        lengths = rng.exponential(500, tokens // 500).astype(np.int64) + 1
        builder.add_documents(rng.randint(0, VOCABULARY, int(lengths.sum())).astype(np.uint16), lengths)
        builder.finalize()
    return IndexedDataset(prefix)


def huge_dataset(prefix: str, documents: int, tokens: int) -> None:
    """Only the index is written; the tokens are zeros that take no space."""
    rng, width = np.random.default_rng(0), 2
    sizes = (rng.standard_exponential(documents, dtype=np.float32) * (tokens / documents)).astype(np.int32) + 1
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype("<u2")], documents, documents + 1))
        file.write(sizes)
        ends = np.cumsum(sizes, dtype=np.int64) * width
        file.write(ends - sizes.astype(np.int64) * width)
        file.write(np.arange(documents + 1, dtype=np.int64))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))


def model_speed(seq: int) -> float:
    """Tokens per second of a plain 10M-parameter model in fp32 (plain_gpt.py), best of three steps."""
    import torch
    from plain_gpt import PlainGPT

    model = PlainGPT(layers=6, hidden=320, heads=5, vocab=4096, sequence=seq)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 9e6 < parameters < 11e6, f"{parameters} parameters"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 4096, (1, seq + 1))

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return seq / min(measure(step)[1] for _ in range(3))
