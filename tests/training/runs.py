"""Whole runs, as `train.py` makes them, on a few documents of characters: for tests of resuming and of callbacks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron import log
from megatron.callbacks.context import Batches
from megatron.data.batch import StepBatch
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import DeepyError
from megatron.mpu.random import seed_everything
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs, plugin_key
from megatron.neox_arguments.derive import Facts, derive
from megatron.run import train as run_module
from megatron.tokenizer import build_tokenizer
from megatron.training.callback import Callback
from megatron.training.setup import Process
from megatron.training.setup_deepspeed import init_deepspeed
from tests.distributed import run_distributed
from tests.training.tiny import LLAMA, Layout, whole_state

KEYS: dict[str, Any] = {
    **LLAMA,
    "tokenizer_type": "CharLevelTokenizer",
    "split": "80,10,10",
    "eod_mask_loss": True,  # the number of trained tokens differs per micro-batch
    "train_batch_size": 8,
    "train_iters": 6,
    "eval_iters": 0,
    "log_interval": 1,
    "checkpoint_factor": 3,
}


def corpus(folder: Path, seed: int = 7, letters: int = ord("a")) -> str:
    """Prefix of a data set of short documents of 26 letters, each with its end mark."""
    rng = np.random.RandomState(seed)
    folder.mkdir(exist_ok=True)
    prefix = folder / "text_document"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in rng.randint(3, 90, 60):
            builder.add_document([*(rng.randint(0, 26, length) ** 2 // 26 + letters).tolist(), 0])
        builder.finalize()
    return str(prefix)


@dataclass(frozen=True)
class Faults:
    """What goes wrong, by the number of the step (the first is 1)."""

    nan_gradients: tuple[int, ...] = ()
    huge_gradients: tuple[int, ...] = ()
    ruined: tuple[int, int] = (0, 0)  # (step, how many times): the weights are
    all_masked: tuple[int, ...] = ()
    corrupt_weight: tuple[int, int] | None = None  # (rank, step)
    signal: tuple[int, int, int] | None = None  # (rank, step, number): the rank gets it in this step
    slow: tuple[int, float] = (-1, 0.0)  # (rank, seconds that it takes longer to read the data of a step)
    late: bool = False  # no fault: what a step comes to is known with the next one, as on an accelerator


@dataclass
class Report:
    """What one rank saw of a run."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    tokens: list[list[str]] = field(default_factory=list)  # hash of each sample, by step
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    evaluated: list[tuple[int, str, dict[str, float]]] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)  # hash of each weight and moment at the end
    error: str = ""
    exit_code: int = 0


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().float().numpy().tobytes()).hexdigest()[:16]


class Recorder(Callback):
    """Writes down the run, and makes the faults."""

    def __init__(self, report: Report, faults: Faults) -> None:
        self.report, self.faults, self.ruined = report, faults, 0

    def start(self, trainer: Any) -> None:
        trainer.late = self.faults.late

    def before_step(self, trainer: Any) -> None:
        if self.faults.slow[0] == trainer.state.rank:
            time.sleep(self.faults.slow[1])
        if self.faults.ruined[0] == trainer.step + 1 and self.ruined < self.faults.ruined[1]:
            self.ruined += 1
            with torch.no_grad():
                for p in trainer.engine.params().values():
                    p.mul_(20.0)
        if self.faults.corrupt_weight == (trainer.state.rank, trainer.step + 1):
            with torch.no_grad():
                next(iter(trainer.engine.params().values())).view(-1)[0] += 1e-3
        if self.faults.signal is not None and self.faults.signal[:2] == (trainer.state.rank, trainer.step + 1):
            os.kill(os.getpid(), self.faults.signal[2])

    def before_update(self, trainer: Any) -> None:
        if trainer.step + 1 in self.faults.nan_gradients:
            for gradient in trainer.engine.grads().values():
                gradient.fill_(torch.nan)
        if trainer.step + 1 in self.faults.huge_gradients:
            for gradient in trainer.engine.grads().values():
                gradient.mul_(10.0)

    def after_step(self, trainer: Any, out: Any) -> None:
        self.report.steps.append(trainer.step)
        self.report.loss.append(float(out.loss))
        self.report.grad_norm.append(None if out.grad_norm is None else float(out.grad_norm))
        self.report.skipped.append(bool(out.skipped))
        self.report.lr.append(trainer.lr)

    def logged(self, trainer: Any, metrics: dict[str, float], step: int) -> None:
        self.report.logged.append((step, metrics))

    def evaluated(self, trainer: Any, split: str, metrics: dict[str, float]) -> None:
        self.report.evaluated.append((trainer.step, split, metrics))

    def end(self, trainer: Any) -> None:
        for name, values in whole_state(trainer.engine).items():
            for key, value in values.items():
                self.report.state[f"{name}/{key}"] = digest(value)


def process_of(rank: int, keys: dict[str, Any], layout: Layout) -> Process:
    """What `start_process` makes, in a rank that has joined already."""
    log.configure(rank)
    plugin_key.import_plugins(keys.get(plugin_key.KEY), lambda name: "test")  # the launcher's config names them
    args = NeoXArgs.from_saved({**KEYS, **keys, **layout.keys()})
    tokenizer = build_tokenizer(args.tokenizer)
    args = derive(args, Facts(vocab_size=tokenizer.vocab_size, num_devices=layout.world))
    init_deepspeed(torch.device("cpu"))
    topology = Topology({"pipe": layout.pp, "data": layout.dp, "model": layout.tp})
    state = ParallelState.build(topology, rank, torch.device("cpu"), layout.sequence_parallel, layout.ep)
    seed_everything(args.training.seed, state)
    return Process(args, state, tokenizer)


def train(rank: int, world: int, keys: dict[str, Any], layout: Layout, faults: Faults) -> Report:
    """One rank of a run. An error meant for the user ends up in the report."""
    process = process_of(rank, keys, layout)
    report = Report()
    with _watched(report, faults):
        try:
            report.exit_code = run_module.train(process)
        except DeepyError as error:
            report.error, report.exit_code = str(error), error.exit_code
    return report


@contextlib.contextmanager
def _watched(report: Report, faults: Faults) -> Iterator[None]:
    callbacks, batches = run_module.build_callbacks, run_module.build_batches

    def steps(inner: Batches) -> Batches:
        def watched(consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
            for batch in inner(consumed, step):
                report.tokens.append([digest(sample) for sample in batch.tokens.flatten(0, 1)])
                masked = batch.step + 1 in faults.all_masked
                yield batch.untrained() if masked else batch

        return watched

    def built(*arguments: Any) -> dict[str, Any]:
        found = batches(*arguments)
        return {**found, "train": steps(found["train"])} if "train" in found else found

    with mock.patch.object(run_module, "build_callbacks", lambda *a: [Recorder(report, faults), *callbacks(*a)]):
        with mock.patch.object(run_module, "build_batches", built):
            yield


def run(keys: dict[str, Any], layout: Layout | None = None, faults: Faults | None = None) -> list[Report]:
    """All ranks of a run; one report per rank."""
    layout = layout or Layout()
    return run_distributed(train, layout.world, keys, layout, faults or Faults(), timeout=110)
