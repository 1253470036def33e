"""`make demo`: from text on this machine to a model in Hugging Face's format, in a few minutes on a CPU.

Each stage prints what it does and the command a user would type. Existing results are reused: the second run shows
those of the first. `make clean` removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = Path("demo")
CHECKPOINTS = DEMO / "checkpoints"
CONFIG = "configs/demo.yml"
CONFIGS = (CONFIG, "configs/tiny.yml", "configs/text_generation.yml")
STOP_AT = 100
PROMPTS = ("def main(", "import os, ", "class Test")
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Stage:
    """One command, its purpose, and whether its result exists."""

    title: str
    explanation: str
    command: str  # as a user would type it
    done: Callable[[], bool]


def last_step() -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    latest = CHECKPOINTS / "latest"
    return int(re.sub(r"\D", "", latest.read_text())) if latest.exists() else 0


def stages(train_iters: int) -> list[Stage]:
    return [
        Stage(
            "Data",
            "This Python's standard library, one document per file, becomes tokens; a byte-level BPE is trained on it.",
            "python prepare_data.py stdlib -d ./data",
            lambda: Path("data/stdlib/stdlib_text_document.idx").exists(),
        ),
        Stage(
            "Plan",
            "Checks the whole run without starting it: which rank does what, sizes, batch arithmetic, epochs.",
            f"python deepy.py train.py {CONFIG} --dry-run",
            lambda: log_of("Plan").exists(),
        ),
        Stage(
            "Train",
            f"Four ranks: tensor parallel 2 x pipeline 2, by DeepSpeed. Stops at step {STOP_AT}, with a checkpoint.",
            f"python deepy.py train.py {CONFIG} exit_interval={STOP_AT}",
            lambda: last_step() >= STOP_AT,
        ),
        Stage(
            "Resume",
            "The same command without the stop: it finds the checkpoint and resumes the run.",
            f"python deepy.py train.py {CONFIG}",
            lambda: last_step() >= train_iters,
        ),
        Stage(
            "Generate",
            "The trained ranks write text: each holds its part of the model, none gathers the whole.",
            f"python deepy.py generate.py {CONFIG} configs/text_generation.yml text_gen_type=input-file "
            f"temperature=0.7 top_k=40 -i {DEMO}/prompts.txt -o {DEMO}/generated.jsonl",
            lambda: (DEMO / "generated.jsonl").exists(),
        ),
        Stage(
            "Export",
            "The checkpoint becomes a folder that `transformers` loads; both models' logits are compared.",
            f"python tools/ckpts/convert_neox_to_hf.py --input_dir {CHECKPOINTS}/global_step{train_iters} "
            f"--config_file {CONFIG} --output_dir {DEMO}/hf",
            lambda: (DEMO / "hf/config.json").exists() and log_of("Export").exists(),
        ),
    ]


def log_of(title: str) -> Path:
    return DEMO / "logs" / f"{title.lower()}.log"


def main() -> int:
    os.chdir(ROOT)
    forget_if_configs_changed()
    (DEMO / "logs").mkdir(parents=True, exist_ok=True)
    (DEMO / "prompts.txt").write_text("\n".join(PROMPTS))
    train_iters = int(re.search(r"^train_iters:\s*(\d+)", Path("configs/tiny.yml").read_text(), re.MULTILINE)[1])
    start = time.monotonic()
    todo = stages(train_iters)
    for number, stage in enumerate(todo, start=1):
        print(f"\n=== {number}/{len(todo)} {stage.title}: {stage.explanation}\n$ {stage.command}", flush=True)
        if stage.done():
            print("    (done before; `make clean` removes all results)")
            continue
        began = time.monotonic()
        code = run(stage)
        if code:
            print(f"\ndemo: this command failed with exit code {code}:\n  {stage.command}", file=sys.stderr)
            return code
        print(f"    ({time.monotonic() - began:.0f} s)", flush=True)
    return summary(time.monotonic() - start)


def run(stage: Stage) -> int:
    """Run the stage's command, showing its output and keeping it in the stage's log; its exit code."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    unfinished = log_of(stage.title).with_suffix(".unfinished")
    with (
        subprocess.Popen(
            ["bash", "-c", stage.command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process,
        unfinished.open("w") as log,
    ):
        for line in process.stdout:
            print(f"    {line}", end="", flush=True)
            log.write(line)
    if process.returncode == 0:
        unfinished.replace(log_of(stage.title))
    return process.returncode


def forget_if_configs_changed() -> None:
    """A checkpoint of another configuration is useless: remove what the demo made from it."""
    digest = hashlib.sha256(b"".join(Path(name).read_bytes() for name in CONFIGS)).hexdigest()
    stamp = DEMO / "configs.sha256"
    if DEMO.exists() and not (stamp.exists() and stamp.read_text() == digest):
        print(f"{DEMO}/ was made with other configs: removing it")
        shutil.rmtree(DEMO)
    DEMO.mkdir(exist_ok=True)
    stamp.write_text(digest)


def summary(seconds: float) -> int:
    """Print the results from the files that the stages wrote. Non-zero when one of them is bad."""
    metrics = [json.loads(line) for line in (CHECKPOINTS / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["train/lm_loss"] for row in metrics if "train/lm_loss" in row}
    first, last = losses[min(losses)], losses[max(losses)]
    validation = [row for row in metrics if "validation/lm_loss" in row]
    difference = float(re.findall(r"logit difference.*largest (\S+)", log_of("Export").read_text())[-1])
    print("\n=== Results")
    print(f"training loss    {first:.3f} (step {min(losses)}) -> {last:.3f} (step {max(losses)})")
    if validation:
        print(f"validation loss  {validation[-1]['validation/lm_loss']:.3f} (step {validation[-1]['step']})")
    for line in (DEMO / "generated.jsonl").read_text().splitlines():
        record = json.loads(line)
        print(f"text             {record['context'] + record['text']!r}"[:160])
    print(f"Hugging Face     {DEMO}/hf, largest logit difference {difference:.1e}")
    print(f"time             {seconds / 60:.1f} minutes")
    print(f"\nNext: load it with AutoModelForCausalLM.from_pretrained('{DEMO}/hf'), or train another one:")
    print("  python deepy.py train.py configs/tiny.yml hidden_size=256 save=checkpoints/wider")
    if not last < first or difference >= LOGIT_TOLERANCE:
        print("demo: the loss did not fall or the exported model differs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
