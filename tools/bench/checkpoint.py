#!/usr/bin/env python
"""Seconds and bytes of a save and of a resume, per data-parallel rank; `--against`: of another checkout too, by turns.

And for how long `async_save` keeps the loop waiting, beside a plain copy of the same bytes to memory that exists.

    python tools/bench/checkpoint.py
    git worktree add /tmp/before v1 && python tools/bench/checkpoint.py --against /tmp/before

Every rank is a process on a CPU with gloo; the checkpoint is in the page cache. Prints one line per checkout and rank:
bytes written to files, sent to other ranks and read of the mapped files, calls that look at or open a file, seconds;
stall and copy take turns in one process, so their ratio holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flags import positive

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("written", "sent", "read", "asked", "save", "load", "copied", "copy", "stall")
TURNS = 5  # of stall and copy, in each process; medians


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=4, help="data-parallel ranks (default 4)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="turns of each checkout; seconds are medians (default 3)"
    )
    parser.add_argument("--layers", type=positive, default=8, help="blocks of the model (default 8)")
    parser.add_argument("--hidden", type=positive, default=768, help="hidden size, 64 per head (default 768)")
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="ZeRO stage, in bfloat16 (default 1)")
    parser.add_argument("--against", type=checkout, help="folder of another checkout (default: only this one)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=checkout, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def checkout(text: str) -> Path:
    """A folder with Deepy: Python would look for another one without a word."""
    path = Path(text).resolve()
    if not (path / "megatron" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} is no checkout: megatron/__init__.py is missing")
    return path


def main(options: argparse.Namespace) -> None:
    if options.rank is not None:
        print(json.dumps(measure(options)))
        return
    sources = [*([options.against] if options.against else []), ROOT]
    found: dict[Path, list[list[dict[str, float]]]] = {source: [] for source in sources}
    for _ in range(options.rounds):
        for source, rounds in found.items():
            rounds.append(one_round(options, source))
    for source, rounds in found.items():
        print(f"{source}: {options.ranks} ranks, {rounds[0][0]['parameters'] / 1e6:.1f} M parameters")
        for rank in range(options.ranks):
            row = {name: statistics.median(ranks[rank][name] for ranks in rounds) for name in COLUMNS}
            sizes = ", ".join(f"{name} {row[name] / 1e6:.1f} MB" for name in ("written", "sent", "read"))
            text = (
                f"  rank {rank}: {sizes}, {row['asked']:.0f} calls; save {row['save']:.2f} s, load {row['load']:.2f} s"
            )
            if row["copy"]:
                text += f"; async_save stalls {row['stall'] * 1e3:.0f} ms"
                text += f", {row['stall'] / row['copy']:.2f} times a copy of {row['copied'] / 1e6:.1f} MB"
            print(text)


def one_round(options: argparse.Namespace, source: Path) -> list[dict[str, float]]:
    """What every rank counts in fresh processes. Raises `UserError` with what a rank says of the configuration."""
    from megatron.errors import UserError

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--source", str(source), "--folder", folder]
        for name in ("ranks", "layers", "hidden", "stage"):
            command += [f"--{name}", str(getattr(options, name))]
        shared = {"WORLD_SIZE": str(options.ranks), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        done = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, done, strict=True):
        if process.returncode == UserError.exit_code:
            raise UserError(errors.rpartition("error: ")[2].strip())
        if process.returncode:
            raise SystemExit(f"a rank failed:\n{errors}")
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One save and one load on this rank."""
    import torch
    import torch.distributed as dist

    import megatron

    assert Path(megatron.__path__[0]).resolve() == options.source / "megatron", f"{megatron.__path__[0]} is measured"
    dist.init_process_group(
        "gloo", init_method=f"file://{options.folder}/meet", rank=options.rank, world_size=options.ranks
    )
    from megatron.checkpoint.find import open_checkpoint
    from megatron.checkpoint.load import load_checkpoint
    from megatron.checkpoint.neox_layout import Heads
    from megatron.checkpoint.save import save_checkpoint

    engine, args = build(options)
    engine.moments()  # as after the first step
    heads, root = Heads.of(args.model), f"{options.folder}/save"
    counts = Counts()
    with counts.watching():
        dist.barrier()
        start = time.perf_counter()
        save_checkpoint(
            root, 1, engine, engine.state, heads=heads, consumed=8, client={}, config=args.to_dict(), save_rng=False
        )
        saved = time.perf_counter() - start
        checkpoint = open_checkpoint(f"{root}/global_step1")
        counts.asked = 0
        dist.barrier()
        start = time.perf_counter()
        load_checkpoint(checkpoint, engine, engine.state, heads=heads, load_rng=False, checksums=False)
        loaded = time.perf_counter() - start
    shapes = [entry.shape for entry in checkpoint.manifest.parameters.values()]
    return {
        "parameters": sum(torch.Size(shape).numel() for shape in shapes),
        "written": counts.written,
        "sent": counts.sent,
        "read": counts.read,
        "asked": counts.asked,
        "save": saved,
        "load": loaded,
        **stall(engine, args, f"{options.folder}/beside"),
    }


def stall(engine: Any, args: Any, root: str) -> dict[str, float]:
    """Seconds for which the loop waits for a save in the background, and for a plain copy; zeros in a checkout that has
    none."""
    import torch
    import torch.distributed as dist

    try:
        from megatron.checkpoint.background import BackgroundSave, aside
        from megatron.checkpoint.host_memory import HostMemory
        from megatron.checkpoint.save import Save
    except ImportError:
        return {"copied": 0, "copy": 0, "stall": 0}
    from megatron.checkpoint.neox_layout import Heads

    beside, memory, times = aside(engine.state, 600), HostMemory(False), ([], [])
    content = {"heads": Heads.of(args.model), "consumed": 8, "client": {}, "config": args.to_dict()}
    values = [value for name in engine.params() for value in engine.read_share(name).values()]
    copies = [torch.zeros_like(value) for value in values]
    for _ in range(TURNS + 1):  # the first turn makes the memory
        dist.barrier()
        start = time.perf_counter()
        for copy, value in zip(copies, values, strict=True):
            copy.copy_(value)
        times[0].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        save = Save(root, 1, engine, engine.state, **content)
        background = BackgroundSave(save, beside)
        save.copy(memory, background.beat)
        background.start()
        times[1].append(time.perf_counter() - start)
        background.result()
    copied = sum(value.nbytes for value in values)
    return {"copied": copied, "copy": statistics.median(times[0][1:]), "stall": statistics.median(times[1][1:])}


def build(options: argparse.Namespace) -> tuple[Any, Any]:
    """This rank's engine and configuration."""
    import torch

    from megatron.mpu.state import ParallelState
    from megatron.mpu.topology import Topology
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.derive import Facts, derive
    from megatron.training.setup import Process, build_engine, build_model
    from megatron.training.setup_deepspeed import init_deepspeed

    keys = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": options.hidden // 64,
        "seq_length": 128,
        "pos_emb": "rotary",
        "train_micro_batch_size_per_gpu": 1,
        "train_iters": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "lr_decay_style": "constant",
        "precision": "bfloat16",
        "zero_optimization": {"stage": options.stage},
        "torch_compile": False,
    }
    args = derive(NeoXArgs.from_saved(keys), Facts(vocab_size=16384, num_devices=options.ranks))
    init_deepspeed(torch.device("cpu"))
    state = ParallelState.build(Topology({"pipe": 1, "data": options.ranks, "model": 1}), options.rank, "cpu")
    process = Process(args, state, SimpleNamespace(vocab_size=16384))  # type: ignore[arg-type]
    return build_engine(process, build_model(process, 1)), args


class Counts:
    """Of this process: bytes that go to files and to other ranks and that are read of mapped files, calls for files."""

    def __init__(self) -> None:
        self.written = self.sent = self.read = self.asked = 0
        self._mapped: list[Any] = []

    def watching(self) -> Any:
        """Counts inside."""
        from contextlib import ExitStack

        import torch
        import torch.distributed as dist
        from torch.utils._python_dispatch import TorchDispatchMode

        from megatron.checkpoint.tensor_file import CheckedFile

        counts = self

        class Read(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                alias = func._schema.returns[0].alias_info if func._schema.returns else None
                if (alias is None or alias.is_write) and func is not torch.ops.aten.new_zeros.default:
                    for x in torch.utils._pytree.tree_leaves(args):
                        if isinstance(x, torch.Tensor) and counts._is_mapped(x):
                            counts.read += min(x.nbytes, result.nbytes)
                return result

        write, load, is_file, send, reduce = CheckedFile.write, torch.load, Path.is_file, dist.isend, dist.all_reduce

        def counted_write(file: Any, data: Any) -> int:
            counts.written += len(memoryview(data).cast("B"))
            return write(file, data)

        def counted_load(path: Any, **named: Any) -> Any:
            content = load(path, **named)
            if isinstance(path, Path):  # not what objects travel in
                counts.asked += 1
                leaves = torch.utils._pytree.tree_leaves(content)
                counts._mapped += [x for x in leaves if isinstance(x, torch.Tensor)]
            return content

        def counted_is_file(path: Path) -> bool:
            counts.asked += 1
            return is_file(path)

        def counted_send(x: Any, *more: Any, **named: Any) -> Any:
            counts.sent += x.nbytes
            return send(x, *more, **named)

        def counted_reduce(tensor: Any, *more: Any, **named: Any) -> Any:
            counts.sent += tensor.nbytes
            return reduce(tensor, *more, **named)

        stack = ExitStack()
        for where, name, counted in (
            (CheckedFile, "write", counted_write),
            (torch, "load", counted_load),
            (Path, "is_file", counted_is_file),
            (dist, "isend", counted_send),
            (dist, "all_reduce", counted_reduce),
        ):
            stack.enter_context(mock.patch.object(where, name, counted))
        stack.enter_context(Read())
        return stack

    def _is_mapped(self, x: Any) -> bool:
        return any(m.data_ptr() <= x.data_ptr() < m.data_ptr() + m.nbytes for m in self._mapped)


if __name__ == "__main__":
    given = parse()
    sys.path.insert(0, str(given.source))
    from megatron.errors import run_cli

    run_cli(lambda: main(given))
