"""One row of the GPU benchmark, measured in this process (gpu.py starts it)."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gpu_models import MODELS, PROFILED, Model, keys_of, shrunk
from plain_gpt import PlainGPT

from megatron.callbacks.flops import device_peak
from megatron.data.batch import StepBatch
from megatron.data.loader import StepLoader
from megatron.data.sample import Sample
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import mixer_flops
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.formulas import flops_per_token
from megatron.run.batches import build_batches
from megatron.run.data import collate_rules, open_data
from megatron.training.setup import Process, build_engine, build_model
from megatron.training.setup_distributed import init_distributed

WARM_UP, SECONDS, MOST, LEAST = 3, 1.5, 20, 4  # steps before, time for a row, steps at most and at least
LOADER_STEPS = 200

Step = Callable[[], None]


class Skip(Exception):
    """Why this machine cannot show a row."""


def measure(name: str, row: str, shrink: bool) -> Iterator[dict[str, Any]]:
    """The figures of a row, then its profile if it is the one that has one. Never raises for a row that fails: then
    `error` is the last line of what went wrong, or `skipped` what it needs."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(shrunk(MODELS[name]) if shrink else MODELS[name], row, Path(folder))
            yield bench.figures()
            if (name, row) == PROFILED:
                yield {"row": f"profile of {row}", "profile": bench.profile()}
    except (Skip, UserError) as reason:
        yield {"skipped": one_line(str(reason))}
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {one_line(str(error))}"}


def one_line(text: str) -> str:
    """First and last line, fit for a cell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return (lines[0][:200] + (f" ... {lines[-1][:100]}" if len(lines) > 1 else "")).replace("|", "/")


class Bench:
    """A row: `step` does an optimizer step, and measures its update while `timing`."""

    def __init__(self, model: Model, row: str, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.who, *self.words = row.split()
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.sequence: int = model.keys["seq_length"]
        self.reach = float(self.sequence)  # mean length of a token's document
        self.timing = False
        self.update: list[float] = []  # ms
        words = self.words
        if self.device.type == "cpu":
            words = ["eager" if word == "compiled" else word for word in words]  # minutes of C++ compilation
        elif "fp8" in words:
            try:
                import transformer_engine.pytorch  # noqa: F401
            except ImportError as error:
                raise Skip("Transformer Engine is not installed") from error
        self.args = self.derived(keys_of(model, words))
        started = time.perf_counter()
        self.step = self.plain() if self.who == "plain" else self.deepy()
        for _ in range(WARM_UP):
            self.step()
        self.wait()
        self.warm_up = time.perf_counter() - started

    def derived(self, keys: dict[str, Any]) -> NeoXArgs:
        if "loader" in self.words:
            keys.update(data_path=str(self.folder / "text"), split="1,0,0", eval_iters=0, train_iters=LOADER_STEPS)
            keys.update(num_workers=2)
        return derive(NeoXArgs.from_saved(keys), Facts(vocab_size=self.model.vocab, num_devices=1))

    # -- contenders --

    def plain(self) -> Step:
        """plain_gpt.py: fp32 weights under autocast, clipping, fused AdamW."""
        keys, pieces = self.model.keys, self.model.pieces
        with torch.device(self.device):
            model = PlainGPT(
                keys["num_layers"], keys["hidden_size"], keys["num_attention_heads"], self.model.vocab, self.sequence
            )
        if "compiled" in self.words and self.device.type == "cuda":
            for block in model.blocks:
                block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        batch = self.fixed_batch().to(self.device)
        parts = list(zip(batch.tokens, batch.targets, strict=True))

        def step() -> None:
            for tokens, targets in parts:
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    loss = model(tokens, targets) / pieces
                loss.backward()
            with self.time_update():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    def deepy(self) -> Step:
        """This library's engine, as train.py builds it."""
        process = self.process()
        model = build_model(process, None)
        with torch.no_grad():  # whatever the configuration's own would be: fast, and the same for all rows
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(std=0.02)
        for module in model.modules():
            for name in ("weight", "scale"):
                p = getattr(module, name, None)
                if isinstance(p, torch.nn.Parameter) and p.ndim == 1:
                    torch.nn.init.ones_(p)
        engine = build_engine(process, model)
        batches = self.read_batches(process) if "loader" in self.words else repeat(self.fixed_batch())

        def step() -> None:
            update = self.time_update()
            engine.before_update = update.__enter__ if self.timing else None  # type: ignore[assignment]
            engine.train_batch(next(batches), 1e-4)
            if self.timing:
                update.__exit__(None, None, None)

        return step

    def process(self) -> Process:
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
        store = None if dist.is_initialized() else dist.HashStore()
        info = SimpleNamespace(rank=0, local_rank=0, world_size=1)
        init_distributed(self.args, info, self.device, store)  # type: ignore[arg-type]
        tokenizer = SimpleNamespace(vocab_size=self.model.vocab, eod=0)
        return Process(self.args, ParallelState.single(self.device), tokenizer)  # type: ignore[arg-type]

    # -- batches --

    def fixed_batch(self) -> StepBatch:
        """One batch of random tokens, in documents if the row packs them."""
        rules = collate_rules(self.args, SimpleNamespace(eod=None, vocab_size=self.model.vocab))  # type: ignore[arg-type]
        samples = RandomSamples(self.model.batch, self.sequence, self.model.vocab)
        if "packed" in self.words:
            self.reach = samples.reach()
        loader = StepLoader(
            samples,  # type: ignore[arg-type]
            micro_batch=self.model.batch // self.model.pieces,
            gas=self.model.pieces,
            rules=rules,
            pin_memory=self.device.type == "cuda",
        )
        return loader.read(0, 0)

    def read_batches(self, process: Process) -> Iterator[StepBatch]:
        """What train.py reads from a file of random documents."""
        rng = np.random.default_rng(0)
        with IndexedDatasetBuilder(self.folder / "text", np.int32) as builder:
            for _ in range(20 * self.model.batch):
                builder.add_document([*rng.integers(1, self.model.vocab, self.sequence).tolist(), 0])
            builder.finalize()
        datasets = open_data(self.args, process.tokenizer).build()
        return iter(build_batches(self.args, process, datasets)["train"](0))

    # -- measuring --

    def figures(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ms, update_ms = self.clock()
        rate = 1000 * self.model.batch * self.sequence / ms
        full, half = (rate * flops for flops in self.flops_per_token())
        peak = device_peak(self.device, None)
        return {
            "device": f"{torch.cuda.get_device_name() if cuda else 'CPU'}, torch {torch.__version__}",
            "tokens_per_second": rate,
            "tflops_full": full / 1e12,
            "mfu_full": full / peak if peak else None,
            "mfu_half": half / peak if peak else None,
            "ms": ms,
            "update_ms": update_ms,
            "allocated_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else None,
            "warm_up_s": self.warm_up,
        }

    def clock(self) -> tuple[float, float]:
        """(ms of a step in a run of steps without waiting in between, ms of the update in single steps)."""
        self.wait()
        start = time.perf_counter()
        self.step()
        self.wait()
        count = min(MOST, max(LEAST, int(SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        ms = 1000 * (time.perf_counter() - start) / count
        self.timing = True
        for _ in range(LEAST):
            self.step()
        self.timing = False
        return ms, sorted(self.update)[len(self.update) // 2]

    def time_update(self) -> contextlib.AbstractContextManager[object]:
        """A context that notes the ms of its block, device work included; nothing while whole steps are timed."""
        return Timed(self.wait, self.update) if self.timing else contextlib.nullcontext()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def flops_per_token(self) -> tuple[float, float]:
        """Attention counted in full, and only what a causal mask leaves of it."""
        model = self.args.model
        full = flops_per_token(model, self.model.vocab)
        attention = sum(mixer_flops(model, kind) for kind in model.attention_config or ())
        hidden = attention * (1 - self.reach / self.sequence)  # other documents
        return full - hidden, full - hidden - (attention - hidden) / 2

    def profile(self, steps: int = 2) -> list[tuple[str, float, float, float]]:
        """The 15 kernels that take longest: name, ms per step, percent of all, calls per step."""
        activity = torch.profiler.ProfilerActivity
        cuda = self.device.type == "cuda"
        with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as recorded:
            for _ in range(steps):
                self.step()
            self.wait()
        key = "self_device_time_total" if cuda else "self_cpu_time_total"
        events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, key))
        total = sum(getattr(event, key) for event in events) or 1.0
        return [
            (e.key[:110], getattr(e, key) / 1000 / steps, 100 * getattr(e, key) / total, e.count / steps)
            for e in events[:15]
        ] + [("all kernels", total / 1000 / steps, 100.0, sum(e.count for e in events) / steps)]


class Timed:
    """See `Bench.time_update`."""

    def __init__(self, wait: Callable[[], None], into: list[float]) -> None:
        self.wait, self.into = wait, into

    def __enter__(self) -> None:
        self.wait()
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.wait()
        self.into.append(1000 * (time.perf_counter() - self.start))


@dataclass
class RandomSamples:
    """Random tokens in documents of log-normal length (median 500, mean about 1000), cut where a sample ends."""

    count: int
    sequence: int
    vocab: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Sample:
        rng = np.random.default_rng(number)
        lengths = np.maximum(8, 500 * np.exp(1.2 * rng.standard_normal(self.sequence // 8))).astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        tokens = rng.integers(0, self.vocab, self.sequence + 1)
        return Sample(tokens, starts[starts < self.sequence])

    def reach(self) -> float:
        """Mean over tokens of the length of their document."""
        squares = [np.diff([*self[i].starts, self.sequence]) ** 2 for i in range(self.count)]  # type: ignore[misc]
        return float(sum(map(np.sum, squares)) / (self.count * self.sequence))
