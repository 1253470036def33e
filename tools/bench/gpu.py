#!/usr/bin/env python
"""Training speed on one GPU: tokens/s, share of the peak, memory and the update, compared with a plain torch loop.

    python tools/bench/gpu.py                          # all rows, most wanted first, about five minutes on an H100
    python tools/bench/gpu.py --models 160M --rows plain "deepy compiled" --results out/

Random weights and tokens in bf16, through the engine that train.py builds; the plain loop is plain_gpt.py under
autocast. All rows of a model take the same batch, in the same micro-batches; gpu_models.py has the models and what the
words of a row switch on. Packed rows have documents of log-normal length (median 500 tokens, mean about 1000) and
attend inside them.

MFU and TF: model FLOPs of the library's own formula, without recomputation. `full` counts causal attention in full, as
most published figures do, `half` only its causal half. The peak is the data sheet's for dense bf16, for FP8 rows as
well. Memory is in GB of 10^9 bytes, at most in a step: what torch's allocator gave out (`allocated`) and what it took
from the device (`reserved`); the CUDA context and NCCL come on top. `update` is norm, clipping and optimizer, which
gradient accumulation spreads over more tokens; it is part of `ms`, and timed separately, waiting for the device.
`published`: what others report for the whole model, see gpu_models.py.

Each row runs in its own process, whose imports are made while the row before is measured. A row that fails shows its
error's last line, one that this machine cannot run what it needs; the others continue. Results are written after each
row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from gpu_models import MODELS, ROWS  # noqa: E402

from megatron.errors import run_cli  # noqa: E402
from megatron.files import write_atomically  # noqa: E402
from megatron.flags import Parser  # noqa: E402

ROW_LIMIT = 100  # seconds without output of a row until its process is killed
GRACE = 40  # seconds that a row which has begun may take after --seconds

Result = dict[str, Any]


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="only rows of these (default: all)")
    parser.add_argument("--rows", nargs="+", help="only rows of these names (default: all)")
    parser.add_argument("--seconds", type=float, default=300, help="start no row after this time (default 300)")
    parser.add_argument(
        "--results", type=Path, help="folder for gpu_bench.md and .json (default: only standard output)"
    )
    parser.add_argument("--shrink", action="store_true", help="tiny models, on any device: a trial run")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.shrink)
        return 0
    wanted = [
        (model, row)
        for model, row in ROWS
        if (not options.models or model in options.models) and (not options.rows or row in options.rows)
    ]
    results: list[Result] = []
    for result in measure(wanted, time.monotonic() + options.seconds, options.shrink):
        print(json.dumps(result), file=sys.stderr, flush=True)
        results.append(result)
        if options.results:
            options.results.mkdir(parents=True, exist_ok=True)
            write_atomically(options.results / "gpu_bench.md", table(results) + "\n")
            write_atomically(options.results / "gpu_bench.json", json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


# -- the parent: one process per row, the next one importing meanwhile ------------------------------------------------


def measure(rows: list[tuple[str, str]], end: float, shrink: bool) -> Iterator[Result]:
    """Results of the rows; every row yields one at least, whatever happens. `end` by the monotonic clock."""
    with contextlib.ExitStack() as processes:
        ready = processes.enter_context(Worker(shrink))
        for number, (model, row) in enumerate(rows):
            name = {"model": model, "row": row}
            if time.monotonic() > end:
                yield {**name, "error": "not run: out of time"}
                continue
            worker = ready
            if number + 1 < len(rows):
                ready = processes.enter_context(Worker(shrink))
            heard = 0
            for result in worker.run(model, row, end + GRACE):
                heard += 1
                yield {**name, **result}
            worker.close()
            if not heard:
                yield {**name, "error": "its process ended or printed nothing in time"}


class Worker:
    """A process that imports everything, then measures one row."""

    def __init__(self, shrink: bool) -> None:
        command = [sys.executable, __file__, "--work", *(["--shrink"] if shrink else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, model: str, row: str, end: float) -> Iterator[Result]:
        """What it reports, until it ends, is silent for too long, or `end`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: the end of its output says so
            self.process.stdin.write(json.dumps([model, row]).encode() + b"\n")
            self.process.stdin.close()
        pipe, heard, rest = self.process.stdout.fileno(), time.monotonic(), b""
        while time.monotonic() < min(heard + ROW_LIMIT, end):
            if select.select([pipe], [], [], 0.5)[0]:
                read = os.read(pipe, 1 << 16)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                heard = time.monotonic()
                yield from (json.loads(line) for line in lines)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def work(shrink: bool) -> None:
    """The process of a row: imports, then waits to be told which row; one JSON line per result."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not a result
    import gpu_row

    if line := sys.stdin.readline():
        for result in gpu_row.measure(*json.loads(line), shrink):
            stdout.write(json.dumps(result) + "\n")


# -- the table --------------------------------------------------------------------------------------------------------

HEADS = (
    "model", "row", "tokens/s", "ratio", "TF full", "MFU full", "MFU half", "ms", "update ms", "allocated", "reserved",
    "first steps s", "published",
)  # fmt: skip


def table(results: list[Result]) -> str:
    """Markdown. `ratio`: tokens/s over the plain loop's of the same model."""
    plain = {r["model"]: r["tokens_per_second"] for r in results if r["row"] == "plain" and "tokens_per_second" in r}
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for r in results:
        if "profile" in r:
            continue
        start, published = f"| {r['model']} | {r['row']} |", MODELS[r["model"]].published.get(r["row"], "")
        if "tokens_per_second" not in r:
            why = r["error"] if "error" in r else f"skipped: {r['skipped']}"
            lines.append(f"{start} {why} |" + " |" * (len(HEADS) - 4) + f" {published} |")
            continue
        cells = (
            f"{r['tokens_per_second']:.0f}",
            f"{r['tokens_per_second'] / plain[r['model']]:.2f}" if r["model"] in plain else "",
            f"{r['tflops_full']:.1f}",
            *(f"{100 * r[key]:.1f} %" if r[key] else "" for key in ("mfu_full", "mfu_half")),
            f"{r['ms']:.1f}",
            f"{r['update_ms']:.1f}",
            *(f"{r[key]:.1f}" if r[key] else "" for key in ("allocated_gb", "reserved_gb")),
            f"{r['warm_up_s']:.1f}",
            published,
        )
        lines.append(f"{start} {' | '.join(cells)} |")
    for r in results:
        if "profile" in r:
            lines += ["", f"Kernels of `{r['row'].removeprefix('profile of ')}`, {r['model']}, ms per step:", ""]
            lines += [
                f"    {ms:9.2f}  {share:5.1f} %  {count:5.0f}x  {name}" for name, ms, share, count in r["profile"]
            ]
    device = next((r["device"] for r in results if "device" in r), "?")
    return f"{device}\n\n" + "\n".join(lines)


if __name__ == "__main__":
    run_cli(main)
