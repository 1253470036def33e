#!/usr/bin/env python
"""Training speed and memory of Deepy's engines, a hand-written torch loop and Hugging Face's Trainer, as ratios.

The model is a GPT-NeoX-style GPT: 6 layers, 384 wide, 6 heads, vocabulary 8192 untied, sequence 512, batch 8, AdamW
with clipping at 1.0. Contenders take turns, a few steps each, so that changes of the machine's speed affect all; the
table has the median over rounds of tokens/s divided by the plain loop's in the same round, and the same ratio in CPU
seconds, which other processes disturb less. Peak memory is that of one process per contender.

    python tools/bench/train_step.py                      # fp32 and bf16, big and small steps
    python tools/bench/train_step.py --precision fp32 --shape big --rounds 7
    python tools/bench/train_step.py --shape long --contenders deepy masked masked-torch   # packed documents

`deepy` runs on DeepSpeed, `native` on the native engine.
`masked` is this library with intra_document_masking and four documents to a sequence; `masked-torch` the same with a
mask for torch's attention instead of one document after the other.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from flags import positive

from megatron.errors import run_cli
from megatron.flags import Parser

if TYPE_CHECKING:
    from megatron.training.setup import Process

LAYERS, HIDDEN, HEADS, VOCAB = 6, 384, 6, 8192
SHAPES = {"big": (8, 512), "small": (1, 64), "long": (2, 2048)}  # batch, tokens per sequence
STEPS = {"big": 2, "small": 12, "long": 2}  # steps of one turn
DOCUMENTS = 4  # per masked sequence

Step = Callable[[], None]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bfloat16"], default=["fp32", "bfloat16"], help="(default: both)"
    )
    parser.add_argument(
        "--shape", nargs="+", choices=list(SHAPES), default=["big", "small"], help="(default: big small)"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        default=DEFAULT,
        help=f"besides plain (default: {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, help="turns of each contender (default 5, after one warm-up)"
    )
    parser.add_argument("--threads", type=positive, default=2, help="of torch (default 2)")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak-memory runs")
    parser.add_argument("--memory-of", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    prepare(options.threads)
    if options.memory_of:
        peak_of(options.memory_of, options.precision[0], options.shape[0])
        return
    for precision in options.precision:
        for shape in options.shape:
            report(precision, shape, options)


def prepare(threads: int) -> None:
    """One process, its own DeepSpeed world, no compiler."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    torch.set_num_threads(threads)


def report(precision: str, shape: str, options: argparse.Namespace) -> None:
    """Time all contenders in turn and print one table."""
    batch, tokens = SHAPES[shape]
    steps = {name: CONTENDERS[name](precision, shape) for name in dict.fromkeys(("plain", *options.contenders))}
    for step in steps.values():
        turn(step, 2)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            before = time.process_time()
            seconds[name].append(turn(step, STEPS[shape]))
            cpu[name].append((time.process_time() - before) / STEPS[shape])
    memory = (
        {} if options.no_memory or shape == "small" else {n: memory_of(n, precision, shape, options) for n in steps}
    )
    print(f"\n{precision}, {batch} x {tokens} tokens a step, {options.threads} threads, {options.rounds} rounds")
    heads = ("", "tokens/s", "ratio to plain (min-max)", "in CPU time", "peak MB", "ratio")
    print("{:12s} {:>9s} {:>26s} {:>18s} {:>9s} {:>6s}".format(*heads))
    for name in steps:
        rate = batch * tokens / statistics.median(seconds[name])
        wall, work = ratio(seconds["plain"], seconds[name]), ratio(cpu["plain"], cpu[name])
        peak = f"{memory[name]:9.0f} {memory[name] / memory['plain']:6.2f}" if memory else ""
        print(f"{name:12s} {rate:9.0f} {wall:>26s} {work:>18s} {peak}")


def ratio(plain: list[float], own: list[float]) -> str:
    """Speed relative to the plain loop, round by round: median (min-max)."""
    ratios = [a / b for a, b in zip(plain, own, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def turn(step: Step, count: int) -> float:
    """Seconds per step of one turn."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def memory_of(name: str, precision: str, shape: str, options: argparse.Namespace) -> float:
    """Peak resident memory in MB of a process that runs only this contender."""
    command = [sys.executable, __file__, "--memory-of", name, "--precision", precision, "--shape", shape]
    command += ["--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def peak_of(name: str, precision: str, shape: str) -> None:
    turn(CONTENDERS[name](precision, shape), 3)
    # Not getrusage: what it calls the peak includes the parent's memory at the moment of the fork.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024)  # type: ignore[index]


def data(shape: str) -> tuple[Any, Any]:
    """Fixed random tokens and targets [batch, tokens]."""
    import torch

    batch, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, VOCAB, (batch, tokens + 1), generator=generator)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def plain(precision: str, shape: str) -> Step:
    """The yardstick: plain torch, autocast for bf16."""
    import torch
    from plain_gpt import PlainGPT

    model = PlainGPT(LAYERS, HIDDEN, HEADS, VOCAB, SHAPES[shape][1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    tokens, targets = data(shape)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def deepy(precision: str, shape: str, **changes: Any) -> Step:
    """This library: the model, the loss and the DeepSpeed engine that train.py builds, with changes to the config."""
    import torch

    from megatron.data.batch import StepBatch
    from megatron.data.collate import CollateRules, allocate, complete
    from megatron.training.setup import build_engine, build_model

    batch, length = SHAPES[shape]
    keys = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "seq_length": length,
        "max_position_embeddings": length,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "make_vocab_size_divisible_by": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "weight_decay": 0.1,
        "precision": precision,
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch,
        "train_iters": 1000,
        **changes,
    }
    process = alone(keys, SimpleNamespace(vocab_size=VOCAB))
    args, engine = process.args, build_engine(process, build_model(process, 0))
    tokens, targets = data(shape)
    columns, ids = torch.arange(length).expand(1, batch, length).contiguous(), None
    if args.model.intra_document_masking:
        ids, columns = columns // (length // DOCUMENTS), columns % (length // DOCUMENTS)
    arrays = allocate(CollateRules(length), 1, batch)
    arrays.tokens, arrays.targets, arrays.positions = tokens[None].numpy(), targets[None].numpy(), columns.numpy()
    arrays.doc_ids = None if ids is None else ids.numpy()
    complete(arrays)
    step_batch = StepBatch.from_arrays(arrays, step=0, consumed=0)
    return lambda: engine.train_batch(step_batch, 1e-3) and None


def alone(keys: dict[str, Any], tokenizer: Any) -> Process:
    """A job of this process."""
    import torch
    import torch.distributed as dist

    from megatron.mpu.state import ParallelState
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.derive import Facts, derive
    from megatron.training.setup import Process
    from megatron.training.setup_distributed import init_distributed

    args = derive(NeoXArgs.from_saved(keys), Facts(vocab_size=tokenizer.vocab_size, num_devices=1))
    info = SimpleNamespace(rank=0, local_rank=0, world_size=1)
    store = None if dist.is_initialized() else dist.HashStore()
    init_distributed(args, info, torch.device("cpu"), store)  # type: ignore[arg-type]
    return Process(args, ParallelState.single(), tokenizer)


def hugging_face(precision: str, shape: str) -> Step:
    """transformers' GPTNeoXForCausalLM, stepped by its Trainer."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments

    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=SHAPES[shape][1],
        rotary_pct=1.0,
        use_parallel_residual=False,
        tie_word_embeddings=False,
        hidden_act="gelu",
    )
    model = GPTNeoXForCausalLM(config)
    tokens, targets = data(shape)
    rows = [{"input_ids": t, "labels": t} for t in tokens]
    folder = tempfile.mkdtemp(prefix="deepy-bench-")
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=len(rows),
        max_steps=1,
        bf16=precision == "bfloat16",
        use_cpu=True,
        optim="adamw_torch_fused",
        weight_decay=0.1,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()  # builds optimizer, scheduler and accelerator
    inputs = {"input_ids": tokens, "labels": tokens}
    del targets

    def step() -> None:
        trainer.training_step(model, dict(inputs))
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()

    assert torch.get_num_threads()
    return step


CONTENDERS: dict[str, Callable[[str, str], Step]] = {
    "plain": plain,
    "deepy": deepy,
    "native": partial(deepy, engine="native"),
    "masked": partial(deepy, intra_document_masking=True),
    "masked-torch": partial(deepy, intra_document_masking=True, attention_backend="torch"),
    "hf-trainer": hugging_face,
}
DEFAULT = ["deepy", "native", "hf-trainer"]

if __name__ == "__main__":
    run_cli(main)
