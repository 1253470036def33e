#!/usr/bin/env python
"""Training speed on one GPU: tokens/s, share of the peak, memory and the update, compared with a plain torch loop.

    python tools/bench/gpu.py                          # all models, about three and a half minutes on an H100
    python tools/bench/gpu.py --models 160M --rows plain "deepy compiled" --results out/

Random weights and tokens in bf16, one micro-batch per step, through the engine that train.py builds; the plain loop is
plain_gpt.py under autocast. Packed rows have documents of log-normal length (median 500 tokens, mean about 1000) and
attend inside them.

MFU = tokens/s · (6 · P + 12 · L · h · s') / peak: P the parameters in matrix products (output matrix included), L
layers, h the width of all heads, s' the sequence length, in packed rows the mean over tokens of their document's
length. Causal attention is counted in full, as in most published figures. `update` is norm, clipping and optimizer,
which gradient accumulation spreads over more tokens; it is part of `ms`, and timed separately, waiting for the device.

Each model runs in its own process. A row that fails shows its error's last line; the others continue.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

WARM_UP, SECONDS, MOST, LEAST = 3, 1.5, 20, 4  # steps before, time for a row, steps at most and at least
ROW_LIMIT = 100  # seconds without output of a row until its process is killed


@dataclass(frozen=True)
class Size:
    """A model, its batch and which rows are measured."""

    keys: dict[str, Any]
    vocab: int
    batch: int
    rows: tuple[str, ...]
    profiled: str | None = None
    plain_pieces: int = 1  # micro-batches of the plain loop, which stores more for backward


def pythia(layers: int, hidden: int, heads: int, sequence: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": sequence,
        "max_position_embeddings": sequence,
        "rotary_pct": 0.25,
        "gpt_j_residual": True,
        "activation": "gelu",
        "bias_gelu_fusion": True,
    }


LLAMA = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "rotary_emb_base": 500000,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "activation": "swiglu",
    "intermediate_size": 8192,
    "gated_width_rule": "final",
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
}
# A row's name is a list of switches; see `Row`.
SIZES = {
    "1.4B": Size(
        pythia(24, 2048, 16, 2048),
        50304,
        8,
        (
            "plain",
            "deepy compiled",
            "deepy compiled cudnn",
            "deepy compiled loss-eager",
            "deepy compiled loss-eager chunk512",
            "deepy compiled packed varlen",
            "deepy eager",
            "deepy eager packed varlen",
            "deepy compiled packed torch",
            "plain compiled",
        ),
        profiled="deepy compiled",
        plain_pieces=2,
    ),
    "llama-1.2B@8192": Size(
        LLAMA,
        128256,
        2,
        (
            "deepy compiled",
            "deepy compiled cudnn",
            "deepy compiled packed varlen",
            "deepy compiled packed flex",
            "deepy eager packed varlen",
        ),
    ),
    "160M": Size(
        pythia(12, 768, 12, 2048), 50304, 16, ("plain", "deepy eager", "deepy compiled", "deepy compiled loss-eager")
    ),
}


@dataclass(frozen=True)
class Row:
    """What the words of a row's name switch on."""

    who: str
    compiled: bool
    packed: bool
    backend: str
    chunk: int
    loss_as_it_is: bool  # not compiled

    @classmethod
    def of(cls, name: str) -> Row:
        words = name.split()
        chunks = [int(w[5:]) for w in words if w.startswith("chunk")]
        backends = [w for w in words if w in ("torch", "cudnn", "varlen", "flex", "flash")]
        return cls(
            words[0],
            "compiled" in words,
            "packed" in words,
            (backends or ["torch"])[0],
            (chunks or [0])[0],
            "loss-eager" in words,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rows", nargs="+", help="only rows of these names")
    parser.add_argument("--seconds", type=float, default=210, help="start no row after this time (default 210)")
    parser.add_argument(
        "--results", type=Path, help="folder for gpu_bench.md and .json (default: only standard output)"
    )
    parser.add_argument("--shrink", action="store_true", help="tiny models, on any device: a trial run")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], options.work[1:], options.shrink)
        return 0
    end = time.monotonic() + options.seconds
    results: list[dict[str, Any]] = []
    for name in options.models:
        wanted = [row for row in SIZES[name].rows if not options.rows or row in options.rows]
        results += list(measure(name, wanted, end, options.shrink))
    text = table(results)
    print(text)
    if options.results:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "gpu_bench.md").write_text(text + "\n")
        (options.results / "gpu_bench.json").write_text(json.dumps(results, indent=1) + "\n")
    return 0


# -- the parent: one process per model, and a new one after a row that broke it -------------------------------------


def measure(model: str, rows: list[str], end: float, shrink: bool) -> Iterator[dict[str, Any]]:
    """Results of the rows of one model; every row yields one, whatever happens."""
    left = list(rows)
    while left:
        if time.monotonic() > end:
            yield from ({"model": model, "row": row, "error": "not run: out of time"} for row in left)
            return
        done = 0
        for result in child(model, left, end, shrink):
            print(f"[{model}] {json.dumps(result)}", file=sys.stderr, flush=True)
            yield result
            done += result["row"] == left[done] if done < len(left) else 0
        if not done:
            yield {"model": model, "row": left[0], "error": "its process ended or printed nothing in time"}
            done = 1
        left = left[done:]


def child(model: str, rows: list[str], end: float, shrink: bool) -> Iterator[dict[str, Any]]:
    """What a process that runs `rows` reports, until it ends or is silent for too long."""
    command = [sys.executable, __file__, "--work", model, *rows, *(["--shrink"] if shrink else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe, heard, rest = process.stdout.fileno(), time.monotonic(), b""
        while True:
            if select.select([pipe], [], [], 0.5)[0]:
                read = os.read(pipe, 1 << 16)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                heard = time.monotonic()
                yield from (json.loads(line) for line in lines)
            if time.monotonic() > min(heard + ROW_LIMIT, end + 40):
                process.kill()
                return


def table(results: list[dict[str, Any]]) -> str:
    """Markdown. `ratio`: tokens/s over the plain loop's of the same model."""
    heads = ("model", "row", "tokens/s", "ratio", "MFU", "ms", "update ms", "peak GB", "first steps s")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    plain = {r["model"]: r["tokens_per_second"] for r in results if r["row"] == "plain" and "error" not in r}
    for r in results:
        if "profile" in r:
            continue
        if "error" in r:
            lines.append(f"| {r['model']} | {r['row']} | {r['error']} |" + " |" * (len(heads) - 3))
            continue
        ratio = f"{r['tokens_per_second'] / plain[r['model']]:.2f}" if r["model"] in plain else ""
        mfu = f"{100 * r['mfu']:.1f} %" if r["mfu"] else ""
        cells = (f"{r['tokens_per_second']:.0f}", ratio, mfu, f"{r['ms']:.1f}", f"{r['update_ms']:.1f}")
        lines.append(f"| {r['model']} | {r['row']} | {' | '.join(cells)} | {r['peak_gb']:.1f} | {r['warm_up_s']:.1f} |")
    for r in results:
        if "profile" in r:
            lines += ["", f"Kernels of `{r['row'].removeprefix('profile of ')}`, {r['model']}, ms per step:", ""]
            lines += [
                f"    {ms:9.2f}  {share:5.1f} %  {count:5.0f}x  {name}" for name, ms, share, count in r["profile"]
            ]
    device = next((r["device"] for r in results if "device" in r), "?")
    return f"{device}\n\n" + "\n".join(lines)


# -- the child: one model -------------------------------------------------------------------------------------------


def work(model: str, rows: list[str], shrink: bool) -> None:
    """Measure rows, one JSON line each; stop after an error that the GPU may not have survived."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not a result
    bench = Bench(model, shrink)
    for row in rows:
        try:
            for result in bench.run(row):
                stdout.write(json.dumps({"model": model, "row": row, **result}) + "\n")
        except Exception as error:
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            text = lines[0][:200] + (f" ... {lines[-1].strip()[:100]}" if len(lines) > 1 else "")
            report = {"model": model, "row": row, "error": f"{type(error).__name__}: {text}".replace("|", "/")}
            stdout.write(json.dumps(report) + "\n")
            if not bench.alive():
                return
        bench.clean()


class Bench:
    """The rows of one model in this process."""

    def __init__(self, model: str, shrink: bool) -> None:
        import torch

        self.torch = torch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.size = SIZES[model]
        self.keys, self.batch, self.vocab = dict(self.size.keys), self.size.batch, self.size.vocab
        if shrink:
            self.keys.update(num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=256)
            self.keys.update({k: v for k, v in {"num_kv_heads": 2, "intermediate_size": 256}.items() if k in self.keys})
            self.batch, self.vocab = 2, 512
        self.sequence = self.keys["seq_length"]
        generator = torch.Generator().manual_seed(0)
        stream = torch.randint(0, self.vocab, (self.batch, self.sequence + 1), generator=generator)
        self.tokens, self.targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
        self.ids = documents(self.batch, self.sequence)
        self.built: Any = None
        self.timing = False

    def run(self, name: str) -> Iterator[dict[str, Any]]:
        """The row's figures, then the profile if this row has one."""
        row = Row.of(name)
        started = time.perf_counter()
        step, update = self.plain(row) if row.who == "plain" else self.deepy(row)
        for _ in range(WARM_UP):
            step()
        self.wait()
        warm_up = time.perf_counter() - started
        self.reset_peak()
        ms, update_ms = self.clock(step, update)
        rate = self.batch * self.sequence / ms * 1000
        yield {
            "device": self.describe(),
            "tokens_per_second": rate,
            "mfu": self.mfu(rate, row.packed),
            "ms": ms,
            "update_ms": update_ms,
            "peak_gb": self.peak_gb(),
            "warm_up_s": warm_up,
        }
        if name == self.size.profiled:
            yield {"row": f"profile of {name}", "profile": self.profile(step)}

    def clock(self, step: Callable[[], None], update: list[float]) -> tuple[float, float]:
        """(ms of a step in a run of steps without waiting in between, ms of the update in single steps)."""
        step()  # its time decides how many
        self.wait()
        start = time.perf_counter()
        step()
        self.wait()
        count = min(MOST, max(LEAST, int(SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        for _ in range(count):
            step()
        self.wait()
        ms = 1000 * (time.perf_counter() - start) / count
        self.timing = True
        for _ in range(LEAST):
            step()
        self.timing = False
        return ms, sorted(update)[len(update) // 2] if update else 0.0

    # -- contenders --

    def plain(self, row: Row) -> tuple[Callable[[], None], list[float]]:
        """plain_gpt.py: fp32 weights under autocast, clipping, fused AdamW."""
        from plain_gpt import PlainGPT

        torch, keys = self.torch, self.keys
        self.built = None
        self.clean()
        with torch.device(self.device):
            model = PlainGPT(
                keys["num_layers"], keys["hidden_size"], keys["num_attention_heads"], self.vocab, self.sequence
            )
        if row.compiled:
            for block in model.blocks:
                block.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        pieces = self.size.plain_pieces
        parts = list(zip(*(x.to(self.device).chunk(pieces) for x in (self.tokens, self.targets)), strict=True))
        update: list[float] = []

        def step() -> None:
            for tokens, targets in parts:
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    loss = model(tokens, targets) / pieces
                loss.backward()
            with self.time(update):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step, update

    def deepy(self, row: Row) -> tuple[Callable[[], None], list[float]]:
        """This library's engine, switched to what the row asks for."""
        from megatron.data.batch import StepBatch
        from megatron.neox_arguments.formulas import loss_chunk
        from megatron.training.compile import compile_blocks

        torch = self.torch
        engine = self.engine()
        chunk = row.chunk or loss_chunk(None, on_gpu=self.device.type == "cuda")
        switch(engine.module, row, self.device, chunk)
        if row.compiled:
            torch._dynamo.reset()
            compile_blocks(engine.module)
            if row.loss_as_it_is:
                switch_loss(engine.module)
        shape = (1, self.batch, self.sequence)
        positions = torch.arange(self.sequence).expand(shape).contiguous()
        if row.packed:
            positions = restart_positions(self.ids)[None]
        batch = StepBatch(
            tokens=self.tokens[None],
            targets=self.targets[None],
            mask=torch.ones(shape),
            positions=positions,
            doc_ids=self.ids[None] if row.packed else None,
            step=0,
            consumed=0,
        )
        update: list[float] = []
        take = type(engine)._take_model_step

        def timed_update(lr_kwargs: Any = None) -> None:
            with self.time(update):
                take(engine, lr_kwargs)

        engine.deepspeed._take_model_step = timed_update
        return lambda: engine.train_batch(batch, 1e-4) and None, update

    def engine(self) -> Any:
        """Built once per process."""
        if self.built is not None:
            return self.built
        self.clean()
        torch = self.torch
        import torch.distributed as dist

        from megatron.mpu.state import ParallelState
        from megatron.neox_arguments import NeoXArgs
        from megatron.neox_arguments.derive import Facts, derive
        from megatron.training.setup import Process, build_engine, build_model
        from megatron.training.setup_distributed import init_distributed

        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
        keys = {
            **self.keys,
            "pos_emb": "rotary",
            "no_weight_tying": True,
            "make_vocab_size_divisible_by": 128,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "weight_decay": 0.1,
            "gradient_clipping": 1.0,
            "precision": "bfloat16",
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": self.batch,
            "train_iters": 1000,
            "torch_compile": False,  # rows switch it on
        }
        args = derive(NeoXArgs.from_saved(keys), Facts(vocab_size=self.vocab, num_devices=1))
        if self.device.type == "cuda":
            torch.cuda.set_device(0)
            self.device = torch.device("cuda", 0)
        info = SimpleNamespace(rank=0, local_rank=0, world_size=1)
        init_distributed(args, info, self.device, None if dist.is_initialized() else dist.HashStore())  # type: ignore[arg-type]
        state = ParallelState.single(self.device)
        process = Process(args, state, SimpleNamespace(vocab_size=self.vocab))  # type: ignore[arg-type]
        model = build_model(process, None)
        with torch.no_grad():  # instead of the library's own, which always draws on the CPU
            for p in model.parameters():
                if p.ndim > 1:
                    p.normal_(std=0.02)
        for module in model.modules():
            for name in ("weight", "scale"):
                p = getattr(module, name, None)
                if isinstance(p, torch.nn.Parameter) and p.ndim == 1:
                    torch.nn.init.ones_(p)
        self.args = args
        self.built = build_engine(process, model)
        return self.built

    # -- the device --

    def time(self, into: list[float]) -> Any:
        """A context that adds the ms of its block, device work included; nothing while whole steps are timed."""
        return Timed(self.wait, into) if self.timing else contextlib.nullcontext()

    def wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def peak_gb(self) -> float:
        return self.torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0

    def describe(self) -> str:
        where = self.torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        return f"{where}, torch {self.torch.__version__}"

    def mfu(self, rate: float, packed: bool) -> float | None:
        from megatron.callbacks.flops import device_peak

        peak = device_peak(self.device, None)
        if peak is None:
            return None
        keys, h = self.keys, self.keys["hidden_size"]
        if "intermediate_size" in keys:
            heads = 1 + keys["num_kv_heads"] / keys["num_attention_heads"]
            layer = 2 * h * h * heads + 3 * h * keys["intermediate_size"]
        else:
            layer = 12 * h * h
        matrices = keys["num_layers"] * layer + self.vocab * h
        reach = float(document_lengths(self.ids).double().mean()) if packed else self.sequence
        return rate * (6 * matrices + 12 * keys["num_layers"] * h * reach) / peak

    def profile(self, step: Callable[[], None], steps: int = 2) -> list[tuple[str, float, float, float]]:
        """The 15 kernels that take longest: name, ms per step, percent of all, calls per step."""
        torch = self.torch
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA] if self.device.type == "cuda" else [activity.CPU]
        with torch.profiler.profile(activities=kinds) as recorded:
            for _ in range(steps):
                step()
            self.wait()
        key = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, key))
        total = sum(getattr(event, key) for event in events) or 1.0
        return [
            (e.key[:110], getattr(e, key) / 1000 / steps, 100 * getattr(e, key) / total, e.count / steps)
            for e in events[:15]
        ] + [("all kernels", total / 1000 / steps, 100.0, sum(e.count for e in events) / steps)]

    def alive(self) -> bool:
        """Whether the device still answers; after an illegal access it does not."""
        try:
            self.clean()
            self.wait()
            return True
        except Exception:
            return False

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()


class Timed:
    """See `Bench.timed`."""

    def __init__(self, wait: Callable[[], None], into: list[float]) -> None:
        self.wait, self.into = wait, into

    def __enter__(self) -> None:
        self.wait()
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.wait()
        self.into.append(1000 * (time.perf_counter() - self.start))


def switch(model: Any, row: Row, device: Any, chunk: int) -> None:
    """Give every attention layer the row's back-end, the head its chunk, and undo compilation."""
    from megatron.layers.attention import SelfAttention
    from megatron.layers.attention_backends import choose_backend
    from megatron.layers.attention_contract import Task
    from megatron.model.block import TransformerBlock
    from megatron.model.head import OutputMatrix

    choice = choose_backend(Task(device, documents=row.packed), row.backend)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.choice, module.attend = choice, choice.backend.attend
        elif isinstance(module, TransformerBlock):
            module._compiled_call_impl = None
        elif isinstance(module, OutputMatrix):
            module.projection = replace(module.projection, compiled=False, chunk=chunk)


def switch_loss(model: Any) -> None:
    """Back to the loss without the compiler."""
    from megatron.model.head import OutputMatrix

    for module in model.modules():
        if isinstance(module, OutputMatrix):
            module.projection = replace(module.projection, compiled=False)


def documents(rows: int, length: int) -> Any:
    """Document numbers [rows, length]: log-normal lengths, cut where a row ends."""
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    for row in ids:
        place, number = 0, 0
        while place < length:
            draw = float(torch.randn((), generator=generator))
            size = max(8, int(500 * 2.718281828 ** (1.2 * draw)))
            row[place : place + size] = number
            place, number = place + size, number + 1
    return ids


def document_lengths(ids: Any) -> Any:
    """[b, s]: how long each token's document is."""
    return (ids[:, :, None] == ids[:, None, :]).sum(-1)


def restart_positions(ids: Any) -> Any:
    """Positions [b, s] that begin again at each document."""
    import torch

    places = torch.arange(ids.shape[1]).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return places - torch.where(begins, places, 0).cummax(1).values


if __name__ == "__main__":
    sys.exit(main())
