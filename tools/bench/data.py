#!/usr/bin/env python
"""Sample index, shuffle, blending, loading: seconds and peak bytes of the compiled builders, of numpy, of plain loops.

Contenders of a table take turns in one process, so that a slowing machine affects all alike; the table has the best
wall and CPU seconds of the rounds. Peak bytes are the most that a call allocates at one time (its result included),
next to the size of the result. Plain loops run on a part and are scaled up, as the table notes.

    python tools/bench/data.py
    python tools/bench/data.py --documents 100000000 --tokens 100000000000 --skip-slow --rounds 1
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive
from loading import bench_growth, bench_packings, bench_resume

from megatron.data import index_builders
from megatron.data.index_builders import build_blend, build_sample_index, fallback
from megatron.data.index_builders.shuffle import shuffle
from megatron.data.packing import Segment
from megatron.data.packing.packed import packed_index
from megatron.errors import run_cli
from megatron.flags import Parser

Contender = tuple[str, Callable[[], object], float]  # name, call, share of the whole that it does

PARTS = ("index", "shuffle", "blend", "packings", "growth", "resume")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--documents", type=positive, default=1_000_000, help="of the corpus (default 1,000,000)")
    parser.add_argument("--tokens", type=positive, default=500_000_000, help="of the corpus (default 500,000,000)")
    parser.add_argument("--seq-length", type=positive, default=2048, help="tokens of a sample (default 2048)")
    parser.add_argument("--blend-samples", type=positive, default=10_000_000, help="of a blend (default 10,000,000)")
    parser.add_argument("--blend-sources", type=positive, default=10, help="of a blend (default 10)")
    parser.add_argument(
        "--loader-samples", type=positive, default=20_000, help="that each packing loads (default 20,000)"
    )
    parser.add_argument(
        "--growth-samples", type=positive, default=100_000, help="in which memory may grow (default 100,000)"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each; the best is shown (default 5)")
    parser.add_argument("--skip-slow", action="store_true", help="leave out the plain loops")
    args = parser.parse_args()
    if index_builders._native is None:
        print("The compiled builders are missing (python setup.py build_ext --inplace): numpy only.")
    parts = {
        "index": lambda: bench_sample_index(args),
        "shuffle": lambda: bench_shuffle(args),
        "blend": lambda: bench_blend(args),
        "packings": lambda: bench_packings(args.loader_samples, args.seq_length),
        "growth": lambda: bench_growth(args.growth_samples),
        "resume": lambda: bench_resume(args.documents, args.tokens, args.seq_length),
    }
    for part in args.only or parts:
        parts[part]()


def bench_sample_index(args: argparse.Namespace) -> None:
    rng = np.random.RandomState(0)
    sizes = rng.exponential(args.tokens / args.documents, args.documents).astype(np.int32) + 1
    doc_idx = np.arange(args.documents, dtype=np.int32)
    rng.shuffle(doc_idx)
    tokens, seq = int(sizes.sum(dtype=np.int64)), args.seq_length
    samples = (tokens - 1) // seq
    segment = Segment(1, samples, 1234)

    def whole() -> object:
        return packed_index(sizes, (0, args.documents), seq, segment)

    contenders: list[Contender] = []
    for name, module in modules():
        call = with_builders(module, lambda: build_sample_index(sizes, doc_idx, seq, samples))
        contenders.append((f"sample_idx, {name}", call, 1.0))
    if not args.skip_slow:
        at_once = lambda: searchsorted(sizes, doc_idx, seq, samples)  # noqa: E731
        contenders.append(("sample_idx, searchsorted at once", at_once, 1.0))
        part = max(1, samples // 20)
        contenders.append(("sample_idx, plain loop", lambda: plain_walk(sizes, doc_idx, seq, part), part / samples))
    for name, module in modules():
        contenders.append((f"all three arrays, {name}", with_builders(module, whole), 1.0))
    show(
        f"Sample index: {tokens:.3g} tokens in {args.documents:.3g} documents, {samples} samples of {seq}",
        contenders,
        args,
    )


def bench_blend(args: argparse.Namespace) -> None:
    weights = 1.0 / np.arange(1, args.blend_sources + 1)
    weights /= weights.sum()
    contenders: list[Contender] = []
    for name, module in modules():
        call = with_builders(module, lambda: build_blend(weights, args.blend_samples))
        contenders.append((f"blend, {name}", call, 1.0))
    if not args.skip_slow:
        part = max(1, args.blend_samples // 500)
        contenders.append(("blend, argmax per sample", lambda: plain_blend(weights, part), part / args.blend_samples))
    show(f"Blending: {args.blend_samples:.3g} samples over {args.blend_sources} sources", contenders, args)


def bench_shuffle(args: argparse.Namespace) -> None:
    array = np.arange(args.documents, dtype=np.int32)
    contenders: list[Contender] = [
        ("shuffle, compiled", lambda: shuffle(np.random.RandomState(1), array), 1.0),
        ("shuffle, numpy's RandomState", lambda: np.random.RandomState(1).shuffle(array), 1.0),
    ]
    show(f"Shuffle of {args.documents:.3g} documents (the same order)", contenders, args)


def modules() -> list[tuple[str, object]]:
    native = [("compiled", index_builders._native)] if index_builders._native is not None else []
    return [*native, ("numpy", fallback)]


def with_builders(module: object, call: Callable[[], object]) -> Callable[[], object]:
    """The call with one module's builders in use."""

    def run() -> object:
        kept, index_builders.builders = index_builders.builders, lambda: module
        try:
            return call()
        finally:
            index_builders.builders = kept

    return run


def show(title: str, contenders: list[Contender], args: argparse.Namespace) -> None:
    best = dict.fromkeys((name for name, _, _ in contenders), float("inf"))
    busy = dict(best)
    for _ in range(args.rounds):
        for name, call, _ in contenders:
            start, cpu = time.perf_counter(), time.process_time()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
            busy[name] = min(busy[name], time.process_time() - cpu)
    columns = f"{'seconds':>9} {'CPU s':>9} {'ratio':>7} {'peak MB':>9} {'result MB':>10} {'peak/result':>12}"
    print(f"\n{title}\n  {'':36} {columns}")
    first = best[contenders[0][0]] / contenders[0][2]
    for name, call, share in contenders:
        tracemalloc.start()
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds, size = best[name] / share, nbytes(result)
        scaled = "" if share == 1.0 else f"   scaled up from {share:.2%}"
        memory = f"{peak / 1e6:9.1f} {size / 1e6:10.1f} {peak / size:12.2f}" if size else f"{peak / 1e6:9.1f}"
        print(f"  {name:36} {seconds:9.4f} {busy[name] / share:9.4f} {seconds / first:7.1f} {memory}{scaled}")


def nbytes(result: object) -> int:
    arrays = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def searchsorted(sizes: np.ndarray, doc_idx: np.ndarray, seq: int, samples: int) -> np.ndarray:
    """The textbook numpy way: one cumulative sum, one binary search for all samples."""
    lengths = sizes[doc_idx]
    ends = np.cumsum(lengths, dtype=np.int64)
    wanted = np.arange(samples + 1, dtype=np.int64) * seq
    position = np.searchsorted(ends, wanted, side="right")
    return np.stack([position, wanted - ends[position] + lengths[position]], axis=1).astype(np.int32)


def plain_walk(sizes: np.ndarray, doc_idx: np.ndarray, seq: int, samples: int) -> np.ndarray:
    """The walk as a loop in Python."""
    out = np.zeros((samples + 1, 2), np.int32)
    position, offset = 0, 0
    for k in range(1, samples + 1):
        remaining = seq + 1
        while True:
            length = sizes[doc_idx[position]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                break
            position, offset = position + 1, 0
        out[k] = position, offset
    return out


def plain_blend(weights: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Blending with one numpy argmax per sample."""
    taken = np.zeros(len(weights))
    source, sample = np.empty(samples, np.uint8), np.empty(samples, np.int64)
    for i in range(samples):
        source[i] = best = np.argmax(weights * max(i, 1) - taken)
        sample[i] = taken[best]
        taken[best] += 1
    return source, sample


if __name__ == "__main__":
    run_cli(main)
