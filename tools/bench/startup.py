#!/usr/bin/env python
"""Seconds from the command to the end of step 1, compared with one DeepSpeed step by hand on the same ranks.

The reference starts as many processes; each imports torch and deepspeed, joins gloo, wraps a plain torch
model of the same size with `deepspeed.initialize` and takes one step. Both take turns; the result is the median ratio.

    python prepare_data.py stdlib -d ./data
    python tools/bench/startup.py                       # one rank
    python tools/bench/startup.py --ranks 4 model_parallel_size=2 pipe_parallel_size=2

With `--resume` it resumes a checkpoint instead, by turns with and without its checksums (`checkpoint_checksums`):

    python tools/bench/startup.py --resume num_layers=8 hidden_size=512
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive

from megatron.cluster.devices import reserve_port
from megatron.errors import run_cli
from megatron.flags import Parser

ROOT = Path(__file__).resolve().parents[2]

BY_HAND = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist, deepspeed
vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
dist.init_process_group("gloo")
deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
from plain_gpt import PlainGPT
model = PlainGPT(4, 128, 4, 8192, 128)
config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
tokens = torch.randint(0, 8192, (4, 129))
engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
engine.step()
"""


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=positive, default=1, help="processes, on CPUs (default 1)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each (default 5, after one warm-up)")
    parser.add_argument("--config", default="configs/tiny.yml", help="of the run (default configs/tiny.yml)")
    parser.add_argument("--resume", action="store_true", help="resume a checkpoint, with and without its checksums")
    parser.add_argument("overrides", nargs="*", help="key=value, as for deepy.py")
    options = parser.parse_args()
    if options.resume:
        return compare_checksums(options)
    deepy_seconds, hand_seconds = [], []
    for turn in range(options.rounds + 1):
        ours, theirs = deepy(options), by_hand(options.ranks)
        if turn > 0:
            deepy_seconds.append(ours)
            hand_seconds.append(theirs)
    ratios = [a / b for a, b in zip(deepy_seconds, hand_seconds, strict=True)]
    print(f"{options.ranks} ranks, {options.rounds} rounds")
    print(f"deepy.py to the end of step 1: {statistics.median(deepy_seconds):.2f} s (median)")
    print(f"one DeepSpeed step by hand:    {statistics.median(hand_seconds):.2f} s (median)")
    print(f"ratio: {statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f})")


def compare_checksums(options: argparse.Namespace) -> None:
    """Wall seconds from the command to the end of the first step after a resume, and CPU seconds of all processes; the
    checkpoint is in the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        deepy(options, f"save={folder}", "extra_save_iters=[1]", "exit_interval=1")
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.pt"))
        found: dict[str, list[tuple[float, float]]] = {"true": [], "false": []}
        for turn in range(options.rounds + 1):
            for checksums, costs in found.items():
                before = cpu_seconds()
                wall = deepy(options, f"load={folder}", f"checkpoint_checksums={checksums}", iteration=2)
                costs += [(wall, cpu_seconds() - before)] if turn > 0 else []
    print(f"{options.ranks} ranks, {options.rounds} rounds, a checkpoint of {size / 1e6:.0f} MB")
    for kind, name in enumerate(("wall", "CPU")):
        checked, unchecked = ([cost[kind] for cost in costs] for costs in found.values())
        ratios = [a / b for a, b in zip(checked, unchecked, strict=True)]
        medians = f"{statistics.median(checked):.2f} s with checksums, {statistics.median(unchecked):.2f} s without"
        print(
            f"{name}: {medians} (medians); ratio {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        )


def cpu_seconds() -> float:
    """Of all processes that have ended so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def deepy(options: argparse.Namespace, *more: str, iteration: int = 1) -> float:
    """Wall seconds until the line of an iteration appears."""
    command = [sys.executable, "deepy.py", "train.py", options.config, f"num_gpus={options.ranks}"]
    command += ["train_iters=2", "log_interval=1", "eval_iters=0", "checkpoint_factor=0", *options.overrides, *more]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if re.search(rf"iteration\s+{iteration}/", line):
            seconds = time.perf_counter() - start
            process.communicate()
            return seconds
    raise SystemExit(f"deepy.py did not reach iteration {iteration}:\n{process.stderr.read()}")


def by_hand(ranks: int) -> float:
    """Wall seconds until every rank has taken its step."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script, reserve_port(None) as port:
        script.write(BY_HAND)
        script.flush()
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
        start = time.perf_counter()
        processes = [
            subprocess.Popen(
                [sys.executable, script.name, str(ROOT / "tools" / "bench")],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(f"the step by hand failed:\n{errors}")
        return time.perf_counter() - start


if __name__ == "__main__":
    run_cli(main)
