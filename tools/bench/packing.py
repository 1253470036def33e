#!/usr/bin/env python
"""Padding, losses and speed of every `pack_impl`, on lengths like those of chats and of web pages.

Lengths are synthetic. Padding and tokens cut off are counted over an epoch. Building is the sample index of an epoch,
from the lengths to the arrays, in CPU seconds, with the peak memory of the process; each packing has its own process.
Loading is the loader's speed on a token file, in real tokens (without padding).

    python tools/bench/packing.py
    python tools/bench/packing.py --documents 100000000 --seq-length 8192 --no-loading
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive

from megatron.data.packing import PACKINGS
from megatron.errors import run_cli
from megatron.flags import Parser

# Name: (median length, sigma of its logarithm).
LIKE = {"chat": (400, 0.9), "web": (500, 1.3)}


class Lengths:
    """Documents that have lengths and nothing else: enough for an index."""

    prefix = "synthetic"

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--documents", type=positive, default=1_000_000, help="for padding and building (default 1,000,000)"
    )
    parser.add_argument("--seq-length", type=positive, default=2048, help="tokens of a sample (default 2048)")
    parser.add_argument("--tokens", type=positive, default=20_000_000, help="for loading (default 20,000,000)")
    parser.add_argument("--no-loading", action="store_true", help="only padding and building")
    parser.add_argument("--one", nargs=2, metavar=("LIKE", "PACK_IMPL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(" | ".join(measure(*args.one, args)))
        return
    print(f"{args.documents:.3g} documents, seq_length {args.seq_length}\n")
    columns = ["documents", "pack_impl", "samples", "padding", "cut off", "build, CPU s", "peak MB"]
    columns += [] if args.no_loading else ["loading, M tokens per CPU s", "first step after resume, ms"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for like in LIKE:
        for name in PACKINGS:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", like, name]
            line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
            print(f"| {line} |", flush=True)


def lengths_like(like: str, documents: int) -> np.ndarray:
    """int32 `[documents]`, drawn in stretches."""
    median, sigma = LIKE[like]
    rng = np.random.RandomState(0)
    sizes = np.empty(documents, np.int32)
    for start in range(0, documents, 1 << 20):
        drawn = np.exp(rng.normal(np.log(median), sigma, min(1 << 20, documents - start)))
        sizes[start : start + len(drawn)] = np.clip(drawn, 2, 1_000_000)
    return sizes


def measure(like: str, name: str, args: argparse.Namespace) -> list[str]:
    """The cells of a row."""
    data: Any = Lengths(lengths_like(like, args.documents))
    start = time.process_time()
    packing = PACKINGS[name](data, seq_length=args.seq_length)
    rows = packing.samples_per_epoch()
    dataset = packing.dataset(packing.segments(rows, 1234))
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    padding, tokens = getattr(packing, "padding", 0.0), int(data.sizes.sum(dtype=np.int64))
    long = (
        data.sizes[data.sizes > args.seq_length + 1] if name in ("pack_until_overflow", "unpacked") else data.sizes[:0]
    )
    cut = int((long - (args.seq_length + 1)).sum(dtype=np.int64))
    del dataset
    cells = [like, name, str(rows), f"{padding:.2%}", f"{cut / tokens:.1%}", f"{seconds:.1f}", f"{peak:.0f}"]
    return cells if args.no_loading else [*cells, *load(like, name, args)]


def load(like: str, name: str, args: argparse.Namespace) -> list[str]:
    """Million real tokens per CPU second, and milliseconds to the first step after a resume near the end."""
    from megatron.data.collate import CollateRules
    from megatron.data.loader import StepLoader
    from megatron.data.tokens.builder import IndexedDatasetBuilder
    from megatron.data.tokens.indexed import IndexedDataset

    with tempfile.TemporaryDirectory() as folder:
        sizes = lengths_like(like, args.tokens // LIKE[like][0])
        with IndexedDatasetBuilder(f"{folder}/x", np.uint16) as builder:
            builder.add_documents(np.random.RandomState(0).randint(1, 50257, int(sizes.sum())).astype(np.uint16), sizes)
            builder.finalize()
        packing = PACKINGS[name](IndexedDataset(f"{folder}/x"), seq_length=args.seq_length)
        dataset = packing.dataset(packing.segments(packing.samples_per_epoch(), 1234))
        rules = CollateRules(args.seq_length, eod=0, intra_document_masking=True, vocab_size=50257)
        loader = StepLoader(dataset, micro_batch=8, gas=4, rules=rules)
        start = time.process_time()
        for _ in loader.steps():
            pass
        seconds = time.process_time() - start
        samples = range(loader.plan.samples(loader.num_steps()))
        tokens = sum(piece.length for i in samples for piece in dataset.locate(i).pieces)
        start = time.perf_counter()
        next(loader.steps(loader.plan.samples(loader.num_steps() - 1)))
        return [f"{tokens / seconds / 1e6:.1f}", f"{(time.perf_counter() - start) * 1e3:.1f}"]


if __name__ == "__main__":
    run_cli(main)
