#!/usr/bin/env python
"""Bits per byte of held-out text after a fixed budget of CPU time: this library beside nanochat and litgpt.

    python prepare_data.py stdlib -d ./data
    python tools/bench/quality.py --data ./data/stdlib/stdlib_text_document --tokenizer ./data/stdlib/tokenizer.json
    python tools/bench/quality.py ... --nanochat ~/nanochat --litgpt ~/litgpt-venv/bin/python     # beside others

Each contender is a process of its own with the same windows of the same tokens in the same order, the same depth,
width and precision (fp32), its own recipe otherwise, and a budget of CPU seconds, of which other work on the machine
takes nothing away. Its schedule is that of a run which ends with the budget. Imports, compilation and the first three
steps are not in it; the table has their seconds. Then one function scores the same held-out windows for all of them.

Documents are shuffled and divided before windows are cut: none is in both parts. nanochat's own loader would show each
window from the beginning of a document, and drop the rest of long ones; here its training script gets these windows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from flags import positive
from quality_contenders import CONTENDERS

from megatron.errors import UserError, run_cli
from megatron.recipes.shapes import FAMILIES

if TYPE_CHECKING:
    import numpy as np

CHILD = Path(__file__).with_name("quality_contenders.py")
HELD_SHARE = 0.05  # of the documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, metavar="PREFIX", help="tokens, as prepare_data.py writes them (without .bin)")
    add("--tokenizer", required=True, type=Path, metavar="FILE", help="their tokenizer.json")
    add("--cpu-seconds", type=positive, default=1200, help="of each contender (default 1200: ten minutes of two cores)")
    add("--threads", type=positive, default=2, help="of torch (default 2)")
    add("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat, to be compared with")
    add("--litgpt", type=Path, metavar="PYTHON", help="an interpreter that has litgpt, to be compared with")
    add("--layers", type=positive, default=4, help="blocks (default 4)")
    add("--hidden", type=positive, default=256, help="width (default 256), in heads of 64")
    add("--tokens", type=positive, default=512, help="per window (default 512)")
    add("--batch", type=positive, default=16, help="windows per step of the others (default 16); ours is in its recipe")
    add("--score", type=positive, default=128, help="held-out windows that are scored (default 128)")
    add("--seed", type=positive, default=1234, help="of the shuffle and the weights (default 1234)")
    add(
        "--family",
        default="llama",
        choices=list(FAMILIES),
        help="of our network, as `deepy new` has it (default llama)",
    )
    add("--config", type=Path, metavar="YAML", help="keys that replace those of our recipe")
    options = parser.parse_args()
    if options.hidden % 64:
        raise UserError(f"--hidden {options.hidden}: must be a multiple of 64, the width of a head")
    pythons = interpreters(options)
    with tempfile.TemporaryDirectory(prefix="deepy-bench-") as folder:
        prepare(options, Path(folder))
        for name, python in pythons.items():
            print(line(contend(name, python, Path(folder))), flush=True)


def interpreters(options: argparse.Namespace) -> dict[str, str]:
    """Who takes part, and the interpreter of each."""
    found = {"deepy": sys.executable}
    if options.nanochat is not None:
        if not (options.nanochat / "scripts" / "base_train.py").is_file():
            raise UserError(f"--nanochat {options.nanochat}: has no scripts/base_train.py; name a checkout of nanochat")
        found["nanochat"] = sys.executable
    if options.litgpt is not None:
        if not options.litgpt.is_file():
            raise UserError(f"--litgpt {options.litgpt}: is no interpreter; name one in which litgpt is installed")
        found["litgpt"] = str(options.litgpt)
    return {name: found[name] for name in CONTENDERS if name in found}


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Windows to train on and to score, bytes of each token, and the task, as files that every interpreter reads."""
    import numpy as np

    from megatron.data.tokens.indexed import IndexedDataset
    from megatron.neox_arguments.yaml_files import parse_value
    from megatron.tokenizer.hugging_face import hf_tokenizer

    sizes = hf_tokenizer(str(options.tokenizer), None).byte_counts()
    if sizes is None:
        raise UserError(f"--tokenizer {options.tokenizer}: nobody knows how many bytes its tokens stand for")
    data = IndexedDataset(options.data)
    order = np.random.default_rng(options.seed).permutation(len(data))
    held = max(1, round(HELD_SHARE * len(data)))
    np.save(folder / "held.npy", windows(data, order[:held], options.tokens)[: options.score])
    np.save(folder / "train.npy", windows(data, order[held:], options.tokens))
    np.save(folder / "bytes.npy", sizes)
    task = {name: value for name, value in vars(options).items() if isinstance(value, int)}
    task |= {
        "vocab": len(sizes),
        "family": options.family,
        "nanochat": str(options.nanochat and options.nanochat.resolve()),
    }
    task["config"] = {} if options.config is None else dict(parse_value(options.config.read_text(encoding="utf-8")))
    (folder / "task.json").write_text(json.dumps(task))


def windows(data: Any, documents: np.ndarray, length: int) -> np.ndarray:
    """[n, length + 1]: the documents one after another, cut into windows that share a token with the next one."""
    import numpy as np

    stream = np.concatenate([data[int(document)] for document in documents]).astype(np.int64)
    count = (len(stream) - 1) // length
    if count < 1:
        raise UserError(f"--data {data.prefix}: has too few tokens for a window of {length}")
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[: count * length : length].copy()


def contend(name: str, python: str, folder: Path) -> dict[str, Any]:
    """Run a contender; what it wrote of itself."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(json.loads((folder / "task.json").read_text())["threads"]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor-{name}"),  # nobody finds what an earlier run has compiled
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process, whose seconds are counted
    }
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run([python, CHILD, name, folder], stdout=out, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise UserError(f"{name} ended with code {done.returncode}:\n{log.read_text()[-2000:]}")
    return {"name": name, **json.loads((folder / f"{name}.json").read_text())}


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:10s} {row['bits_per_byte']:.4f} bits per byte after {row['cpu_seconds']:.0f} CPU s "
        f"({row['start_seconds']:.0f} before): {row['steps']} steps, {row['tokens']:,} tokens, "
        f"{row['parameters'] / 1e6:.1f}M parameters, {row['wall_seconds']:.0f} s by the clock"
    )


if __name__ == "__main__":
    run_cli(main)
