"""`make demo`: from text on this machine to a model in Hugging Face's format, in a few minutes on a CPU.

Each stage prints what it does and the command a user would type. Existing results are reused: the second run shows
those of the first. `make clean` removes them. `demo_post.py` shows what comes after that in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.cli import as_deepy
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.home import HOME, LIBRARY

DEMO = Path("demo")
CHECKPOINTS = DEMO / "checkpoints"
CONFIG = "configs/demo.yml"
CONFIGS = (CONFIG, "configs/tiny.yml", "configs/text_generation.yml")
STOP_AT = 100
PROMPTS = ("def main(", "import os, ", "class Test")
LOGIT_TOLERANCE = 1e-4


def typed(text: str) -> str:
    """Command lines as one types them: outside a checkout those of the installed command."""
    return text if HOME == LIBRARY else as_deepy(text)


@dataclass(frozen=True)
class Stage:
    """One command, its purpose, and whether its result exists."""

    title: str
    explanation: str
    script: str  # as a user of a checkout types it
    done: Callable[[], bool]

    @property
    def command(self) -> str:
        """As a user would type it."""
        return typed(self.script)


@dataclass(frozen=True)
class Demo:
    """Stages that are run one after the other, in a folder that lasts as long as the files they are made from do.

    Attributes:
        folder: of the results.
        made_from: configs and data; when one changes, the results are removed.
        stages: in their order.
        summary: prints the results; true when they are good.
    """

    folder: Path
    made_from: Sequence[str]
    stages: Sequence[Stage]
    summary: Callable[[], bool]

    def run(self) -> int:
        """Run what is not done yet and show the results. Returns the exit code."""
        self._forget_if_changed()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        for number, stage in enumerate(self.stages, start=1):
            print(
                f"\n=== {number}/{len(self.stages)} {stage.title}: {stage.explanation}\n$ {stage.command}", flush=True
            )
            if stage.done():
                print("    (done before; `make clean` removes all results)")
                continue
            began = time.monotonic()
            code = self._run(stage)
            if code:
                print(f"\ndemo: this command failed with exit code {code}:\n  {stage.command}", file=sys.stderr)
                return code
            print(f"    ({time.monotonic() - began:.0f} s)", flush=True)
        print("\n=== Results")
        good = self.summary()
        print(f"time             {(time.monotonic() - start) / 60:.1f} minutes")
        return 0 if good else 1

    def _run(self, stage: Stage) -> int:
        """Run the stage's command, showing its output and keeping it in the stage's log; its exit code."""
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        log_file = log_of(self.folder, stage.title)
        unfinished = log_file.with_suffix(".unfinished")
        command = ["bash", "-e", "-c", stage.command]
        with (
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            ) as process,
            unfinished.open("w") as log,
        ):
            for line in process.stdout:
                print(f"    {line}", end="", flush=True)
                log.write(line)
        if process.returncode == 0:
            unfinished.replace(log_file)
        return process.returncode

    def _forget_if_changed(self) -> None:
        """A checkpoint of another configuration is useless: remove what the demo made from it."""
        digest = hashlib.sha256(b"".join(_bytes_of(name) for name in self.made_from)).hexdigest()
        stamp = self.folder / "configs.sha256"
        if self.folder.exists() and not (stamp.exists() and stamp.read_text() == digest):
            print(f"{self.folder}/ was made with other configs: removing it")
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        stamp.write_text(digest)


def _bytes_of(name: str) -> bytes:
    """The content of a file here, else of one that comes with Deepy."""
    return (Path(name) if Path(name).is_file() else HOME / name).read_bytes()


def log_of(folder: Path, title: str) -> Path:
    """The output of a stage that is done."""
    return folder / "logs" / f"{title.lower().replace(' ', '_')}.log"


def last_step(checkpoints: Path) -> int:
    """Step of the newest complete checkpoint, 0 without one."""
    latest = checkpoints / "latest"
    return int(re.sub(r"\D", "", latest.read_text())) if latest.exists() else 0


def read_metric(checkpoints: Path, name: str) -> dict[int, float]:
    """A metric of a run by step."""
    rows = [json.loads(line) for line in (checkpoints / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


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
            lambda: log_of(DEMO, "Plan").exists(),
        ),
        Stage(
            "Train",
            f"Four ranks: tensor parallel 2 x pipeline 2, by DeepSpeed. Stops at step {STOP_AT}, with a checkpoint.",
            f"python deepy.py train.py {CONFIG} exit_interval={STOP_AT}",
            lambda: last_step(CHECKPOINTS) >= STOP_AT,
        ),
        Stage(
            "Resume",
            "The same command without the stop: it finds the checkpoint and resumes the run.",
            f"python deepy.py train.py {CONFIG}",
            lambda: last_step(CHECKPOINTS) >= train_iters,
        ),
        Stage(
            "Generate",
            "The trained ranks write text: each holds its part of the model, none gathers the whole.",
            f"printf '%s\\n' {' '.join(map(shlex.quote, PROMPTS))} > {DEMO}/prompts.txt\n"
            f"python deepy.py generate.py {CONFIG} configs/text_generation.yml text_gen_type=input-file "
            f"temperature=0.7 top_k=40 -i {DEMO}/prompts.txt -o {DEMO}/generated.jsonl",
            lambda: (DEMO / "generated.jsonl").exists(),
        ),
        Stage(
            "Export",
            "The checkpoint becomes a folder that `transformers` loads; both models' logits are compared.",
            f"python tools/ckpts/convert_neox_to_hf.py --input_dir {CHECKPOINTS}/global_step{train_iters} "
            f"--config_file {CONFIG} --output_dir {DEMO}/hf",
            lambda: (DEMO / "hf/config.json").exists() and log_of(DEMO, "Export").exists(),
        ),
    ]


def parser() -> Parser:
    """No flags, but --help."""
    return Parser(description=__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo: in the checkout, and of an installed Deepy in the folder of the call."""
    parser().parse_args(argv)
    if HOME == LIBRARY:
        os.chdir(HOME)
    config = (HOME / "configs/tiny.yml").read_text()
    train_iters = int(re.search(r"^train_iters:\s*(\d+)", config, re.MULTILINE)[1])
    return Demo(DEMO, CONFIGS, stages(train_iters), summary).run()


def summary() -> bool:
    """Print the results from the files that the stages wrote; whether they are good."""
    losses = read_metric(CHECKPOINTS, "train/lm_loss")
    first, last = losses[min(losses)], losses[max(losses)]
    difference = float(re.findall(r"logit difference.*largest (\S+)", log_of(DEMO, "Export").read_text())[-1])
    print(f"training loss    {first:.3f} (step {min(losses)}) -> {last:.3f} (step {max(losses)})")
    for step, loss in list(read_metric(CHECKPOINTS, "validation/lm_loss").items())[-1:]:
        print(f"validation loss  {loss:.3f} (step {step})")
    for line in (DEMO / "generated.jsonl").read_text().splitlines():
        record = json.loads(line)
        print(f"text             {record['context'] + record['text']!r}"[:160])
    print(f"Hugging Face     {DEMO}/hf, largest logit difference {difference:.1e}")
    print(f"\nNext: load it with AutoModelForCausalLM.from_pretrained('{DEMO}/hf'), or train another one:")
    print(typed("  python deepy.py train.py configs/tiny.yml hidden_size=256 save=checkpoints/wider\n"))
    good = last < first and difference < LOGIT_TOLERANCE
    if not good:
        print("demo: the loss did not fall or the exported model differs", file=sys.stderr)
    return good


if __name__ == "__main__":
    run_cli(main)
