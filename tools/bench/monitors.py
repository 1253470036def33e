#!/usr/bin/env python
"""What watching over the numbers of a run costs: steps of the loop with and without the monitors, as a ratio.

The model is a GPT of 10 million parameters (6 layers, 320 wide, vocabulary 4096 untied; native engine, AdamW). Two
runs take turns of a few steps each in one process, so that changes of the machine's speed affect both. The table has
the median over turns of the seconds with the monitors over those without in the turn before, the ratio of the sums of
all turns (with what happens every 50th step), and the latter in CPU seconds, which other processes disturb less.

    python tools/bench/monitors.py                    # all monitors together
    python tools/bench/monitors.py --monitors skip_outliers on_spike noise norms all --steps 200
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from flags import positive

from megatron.errors import run_cli
from megatron.flags import Parser

VOCAB, TURN, WARM_UP = 4096, 5, 2  # steps of a turn, turns that do not count
MODEL: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 320,
    "num_attention_heads": 5,
    "seq_length": 256,
    "max_position_embeddings": 256,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "make_vocab_size_divisible_by": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "engine": "native",
    "log_interval": 10,
    "torch_compile": False,
}
MONITORS: dict[str, dict[str, Any]] = {
    "none": {},
    "skip_outliers": {"skip_outliers": True},
    "on_spike": {"on_spike": "warn"},
    "noise": {"log_gradient_noise_scale": True},
    "norms": {"monitor_interval": 50},
    "attention": {"monitor_interval": 50, "monitor_attention": True},  # with the norms
}
MONITORS["all"] = {key: value for keys in MONITORS.values() for key, value in keys.items()}


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--monitors", nargs="+", choices=list(MONITORS), default=["all"], help="(default: all)")
    parser.add_argument("--steps", type=positive, default=100, help="of each run, after ten more (default 100)")
    parser.add_argument("--batch", type=positive, default=4, help="sequences of 256 tokens of a step (default 4)")
    parser.add_argument("--threads", type=positive, default=2, help="of torch (default 2)")
    options = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu")
    import torch

    torch.set_num_threads(options.threads)
    print(f"{options.batch} x 256 tokens a step, {options.threads} threads, {options.steps} steps of each run")
    print(f"{'':14s} {'s per step':>11s} {'ratio, median':>14s} {'of sums':>8s} {'in CPU time':>12s}")
    for name in options.monitors:
        plain, watched = measure(MONITORS[name], options)
        medians = statistics.median(b / a for (a, _), (b, _) in zip(plain, watched, strict=True))
        wall, cpu = (sum(t[i] for t in watched) / sum(t[i] for t in plain) for i in (0, 1))
        seconds = sum(t[0] for t in plain) / options.steps
        print(f"{name:14s} {seconds:11.3f} {medians:14.4f} {wall:8.4f} {cpu:12.4f}")


def measure(monitors: dict[str, Any], options: argparse.Namespace) -> list[list[tuple[float, float]]]:
    """(seconds, CPU seconds) of each turn of a run without and of one with the monitors."""
    baton = [threading.Semaphore(0), threading.Semaphore(0)]
    found: list[list[tuple[float, float]]] = [[], []]
    threads = []
    for index, keys in enumerate(({}, monitors)):
        trainer = build(keys, options, found[index], baton[index], baton[1 - index])
        threads.append(threading.Thread(target=trainer.run))
    for thread in threads:
        thread.start()
    baton[0].release()
    for thread in threads:
        thread.join()
    return [turns[WARM_UP:] for turns in found]


def build(keys: dict[str, Any], options: argparse.Namespace, found: list[Any], mine: Any, other: Any) -> Any:
    """A trainer whose turns end by handing over to the other one."""
    import torch

    from megatron.callbacks import CALLBACKS, RunContext
    from megatron.mpu.state import ParallelState
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.callback_key import choose_callbacks
    from megatron.neox_arguments.derive import Facts, derive
    from megatron.training.callback import Callback
    from megatron.training.setup import Process, build_engine, build_model, build_schedule
    from megatron.training.trainer import Trainer

    class Turns(Callback):
        """Times turns; the time in which the other run has its turn does not count."""

        began: tuple[float, float] | None = None

        def before_step(self, trainer: Trainer) -> None:
            if trainer.step % TURN == 0:
                self.end(trainer)
                mine.acquire()
                self.began = (time.perf_counter(), time.process_time())

        def end(self, trainer: Trainer) -> None:
            if self.began is not None:
                found.append((time.perf_counter() - self.began[0], time.process_time() - self.began[1]))
                other.release()

    steps = options.steps + WARM_UP * TURN
    sizes = {"train_batch_size": options.batch, "train_micro_batch_size_per_gpu": options.batch, "train_iters": steps}
    args = derive(NeoXArgs.from_saved({**MODEL, **sizes, **keys}), Facts(vocab_size=VOCAB, num_devices=1))
    state = ParallelState.single()
    context = RunContext(args, state, VOCAB)
    chosen = [one for one in choose_callbacks(args) if one.phase in ("measure", "log") and one.name not in ("console",)]
    callbacks = [CALLBACKS[one.name].build(context, **one.settings) for one in chosen]
    trainer = Trainer(args, state, batches(options.batch), [Turns(), *filter(None, callbacks)], build_schedule(args))
    process = Process(args, state, SimpleNamespace(vocab_size=VOCAB))  # type: ignore[arg-type]
    torch.manual_seed(0)
    trainer.engine = build_engine(process, build_model(process, 0))
    trainer.call("start")
    return trainer


def batches(rows: int) -> Any:
    """Random tokens, the same for both runs."""
    import numpy as np

    from megatron.data.batch import StepBatch
    from megatron.data.collate import StepArrays, complete

    def steps(consumed: int, step: int) -> Any:
        length = MODEL["seq_length"]
        for number in range(step, 10**9):
            stream = np.random.RandomState(number).randint(0, VOCAB, (1, rows, length + 1))
            columns = np.broadcast_to(np.arange(length), (1, rows, length)).copy()
            mask = np.ones((1, rows, length), np.float32)
            arrays = StepArrays(stream[..., :-1].copy(), stream[..., 1:].copy(), mask, columns, None)
            complete(arrays)
            yield StepBatch.from_arrays(arrays, step=number, consumed=number * rows)

    return steps


if __name__ == "__main__":
    run_cli(main)
