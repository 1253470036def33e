#!/usr/bin/env python
"""Seconds and memory of converting a random checkpoint both ways, compared with copying its bytes with safetensors.

Every step is its own process, imports included, and reads from the page cache. The copy is
`save_file(load_file(shard))` for each shard. Seconds are the median of the rounds. Memory is the peak that the kernel
counted for the process (its maximum resident set): it includes pages of mapped files while they are cached. So the peak
of the process's own memory (RssAnon, sampled) is shown too. Checkpoints are synced to disk (fsync); a copy that is
synced too has its own line.

    python tools/bench/convert.py                                   # 1.5B parameters in bf16; 10 GB of disk in /tmp
    python tools/bench/convert.py --size 160M --architecture neox --tp 2 --max-shard-size 100MB --folder /scratch
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive

from megatron.errors import run_cli
from megatron.flags import Parser

ROOT = Path(__file__).resolve().parents[2]
SIZES = {  # layers, hidden size, heads, width of the feed-forward
    "10M": (2, 96, 4, 256),
    "160M": (12, 768, 12, 2048),
    "410M": (24, 1024, 16, 2816),
    "1.5B": (26, 2048, 16, 5632),
}
VOCABULARY = 50304


@dataclass(frozen=True)
class Used:
    """What a process used: seconds, and MB at its peak."""

    wall: float
    cpu: float
    resident: float
    own: float


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.5B", help="parameters (default 1.5B)")
    parser.add_argument(
        "--architecture", choices=("llama", "neox"), default="llama", help="of the model (default llama)"
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights (default bf16)"
    )
    parser.add_argument("--tp", type=positive, default=1, help="files of the checkpoint (default 1)")
    parser.add_argument("--max-shard-size", default="5GB", help="of the Hugging Face folders (default 5GB)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each step (default 3)")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--part", nargs=3, metavar=("PART", "FROM", "TO"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        PARTS[given.part[0]](given, *map(Path, given.part[1:]))
        return
    if given.folder is not None:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report(given, Path(folder))


def report(given: argparse.Namespace, folder: Path) -> None:
    """Run every step in turn, and print the table."""
    source, checkpoint, back = folder / "source", folder / "checkpoint", folder / "back"
    measure([*this(given), "--part", "make", folder, source])
    shards = sorted(path.stat().st_size for path in source.glob("*.safetensors"))
    print(
        f"{given.size} parameters, {given.architecture}, {given.precision}: {sum(shards) / 1e9:.2f} GB in "
        f"{len(shards)} shards, the largest {shards[-1] / 1e9:.2f} GB; checkpoint in {given.tp} parts; "
        f"{given.rounds} rounds, {os.cpu_count()} cores"
    )
    hf_to_neox = [ROOT / "huggingface/convert_hf_to_neox.py", "--hf-model", source, "--output-dir", checkpoint]
    hf_to_neox += ["--tp", str(given.tp)]
    neox_to_hf = [ROOT / "tools/ckpts/convert_neox_to_hf.py", "--input_dir", checkpoint, "--output_dir", back]
    neox_to_hf += ["--no_save_tokenizer", "--max-shard-size", given.max_shard_size]
    steps = {
        "copy with safetensors": ([*this(given), "--part", "copy", source, folder / "copy"], folder / "copy"),
        "copy, durable": ([*this(given), "--part", "durable", source, folder / "copy"], folder / "copy"),
        "to a checkpoint, --no-check": ([*hf_to_neox, "--no-check"], checkpoint),
        "to a checkpoint": (hf_to_neox, checkpoint),
        "to Hugging Face, --no-check": ([*neox_to_hf, "--no-check"], back),
        "to Hugging Face": (neox_to_hf, back),
    }
    used: dict[str, list[Used]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, (command, output) in steps.items():
            shutil.rmtree(output, ignore_errors=True)
            os.sync()  # write out what earlier steps left
            used[name].append(measure(command))
    measure([*this(given), "--part", "equal", source, back])
    print_table(used, 1.5 * shards[-1] / 1e6 + 1000)
    print("There and back every tensor is the same, bit for bit")


def print_table(used: dict[str, list[Used]], goal: float) -> None:
    baseline = statistics.median(each.wall for each in used["copy with safetensors"])
    print(f"\n  {'':30} {'wall s':>7} {'CPU s':>7} {'x copy':>7} {'peak MB':>8} {'own MB':>8}")
    for name, rounds in used.items():
        wall, cpu = (statistics.median(getattr(each, what) for each in rounds) for what in ("wall", "cpu"))
        resident, own = (max(getattr(each, what) for each in rounds) for what in ("resident", "own"))
        print(f"  {name:30} {wall:7.2f} {cpu:7.2f} {wall / baseline:7.2f} {resident:8.0f} {own:8.0f}")
    print(f"\nGoals: x copy <= 2 without the check; peak MB <= {goal:.0f} (1.5 x the largest shard + 1 GB)")


def measure(command: list[str | Path]) -> Used:
    """Run a command of Python's to its end. Stops everything when it fails."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    own = 0.0
    while True:
        own = max(own, own_memory(child.pid))
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        time.sleep(0.005)
    wall = time.perf_counter() - start
    if status:
        assert child.stdout is not None
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{child.stdout.read().decode()}")
    return Used(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, own)


def own_memory(pid: int) -> float:
    """MB of a process that are no file's."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def this(given: argparse.Namespace) -> list[str | Path]:
    """This script with its options."""
    options = {"--size": given.size, "--architecture": given.architecture, "--precision": given.precision}
    options["--max-shard-size"] = given.max_shard_size
    return [Path(__file__), *(word for pair in options.items() for word in pair)]


def make(given: argparse.Namespace, _: Path, output: Path) -> None:
    """A random model as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[given.precision]
    output.mkdir()
    config, shapes = architectures()[given.architecture](*SIZES[given.size])
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    (output / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    limit = int(float(given.max_shard_size[:-2]) * {"MB": 1e6, "GB": 1e9}[given.max_shard_size[-2:]])
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes:
        tensor = torch.empty(shape).normal_(std=0.02, generator=generator).to(dtype)
        if "norm" in name and name.endswith("weight"):
            tensor += 1
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + tensor.nbytes > limit:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], output / "model.safetensors", {"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, output / file, {"format": "pt"})
    index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


Shapes = list[tuple[str, tuple[int, ...]]]


def architectures() -> dict[str, Callable[[int, int, int, int], tuple[dict[str, object], Shapes]]]:
    return {"llama": llama, "neox": neox}


def llama(layers: int, hidden: int, heads: int, width: int) -> tuple[dict[str, object], Shapes]:
    config: dict[str, object] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": width, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    }  # fmt: skip

    def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (VOCABULARY, hidden)
        for i in range(layers):
            yield f"model.layers.{i}.input_layernorm.weight", (hidden,)
            yield f"model.layers.{i}.post_attention_layernorm.weight", (hidden,)
            for part in "qkvo":
                yield f"model.layers.{i}.self_attn.{part}_proj.weight", (hidden, hidden)
            yield f"model.layers.{i}.mlp.up_proj.weight", (width, hidden)
            yield f"model.layers.{i}.mlp.gate_proj.weight", (width, hidden)
            yield f"model.layers.{i}.mlp.down_proj.weight", (hidden, width)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (VOCABULARY, hidden)

    return config, list(tensors())


def neox(layers: int, hidden: int, heads: int, width: int) -> tuple[dict[str, object], Shapes]:
    width = width * 3 // 2  # two matrices instead of LLaMA's three
    config: dict[str, object] = {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "num_hidden_layers": layers,
        "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": width, "hidden_act": "gelu",
        "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10000, "max_position_embeddings": 2048,
        "use_parallel_residual": True,
    }  # fmt: skip

    def both(name: str, out: int, wide: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (out,) if wide is None else (out, wide)
        yield f"{name}.bias", (out,)

    def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "gpt_neox.embed_in.weight", (VOCABULARY, hidden)
        for i in range(layers):
            layer = f"gpt_neox.layers.{i}"
            yield from both(f"{layer}.input_layernorm", hidden, None)
            yield from both(f"{layer}.post_attention_layernorm", hidden, None)
            yield from both(f"{layer}.attention.query_key_value", 3 * hidden, hidden)
            yield from both(f"{layer}.attention.dense", hidden, hidden)
            yield from both(f"{layer}.mlp.dense_h_to_4h", width, hidden)
            yield from both(f"{layer}.mlp.dense_4h_to_h", hidden, width)
        yield from both("gpt_neox.final_layer_norm", hidden, None)
        yield "embed_out.weight", (VOCABULARY, hidden)

    return config, list(tensors())


def copy(given: argparse.Namespace, source: Path, output: Path) -> None:
    """What safetensors alone does: every shard read and written."""
    from safetensors.torch import load_file, save_file

    output.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        save_file(load_file(path), output / path.name, {"format": "pt"})


def durable(given: argparse.Namespace, source: Path, output: Path) -> None:
    """The same, and the files are on the disk at the end."""
    copy(given, source, output)
    for path in output.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def equal(given: argparse.Namespace, source: Path, back: Path) -> None:
    """Fails when two folders do not hold the same tensors."""
    import torch
    from safetensors.torch import load_file

    one, other = (
        {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()} for folder in (source, back)
    )
    if one.keys() != other.keys() or any(not torch.equal(tensor, other[name]) for name, tensor in one.items()):
        raise SystemExit(f"{source} and {back} differ")


PARTS = {"make": make, "copy": copy, "durable": durable, "equal": equal}

if __name__ == "__main__":
    run_cli(main)
