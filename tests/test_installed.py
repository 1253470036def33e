"""The wheel in an environment of its own and an empty folder: text, tokens, training, resuming, text, Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from megatron.commands.table import COMMANDS, rows
from tests.faults.commands import environment

pytestmark = [pytest.mark.cpu, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[1]
# a model of a few thousand parameters, out of a config that comes with Deepy
SMALL = ["num_layers=1", "hidden_size=32", "num_attention_heads=2", "seq_length=32", "train_batch_size=4"]
SHORT = ["seq_length=32", "train_iters=4", "lr_decay_iters=4", "eval_iters=1"]
ALL_HELP = """
import contextlib, io, sys
from megatron.commands.cli import run
for words in {paths}:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try: run([*words, "--help"])
        except SystemExit as end: assert not end.code, words
    assert text.getvalue().startswith(("usage: deepy", "Look at data")), (words, text.getvalue()[:200])
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a new environment with the wheel, and this one's packages behind it."""
    folder = tmp_path_factory.mktemp("installed")

    def run(*command: str | Path, **options: Any) -> Any:
        return subprocess.run(command, cwd=folder, check=True, timeout=200, **options).stdout

    # a build leaves its own folders in the tree, so it has a copy
    names = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", stdout=PIPE)
    packed = run("tar", "-C", ROOT, "--null", "-T", "-", "-cf", "-", input=names, stdout=PIPE)
    (folder / "source").mkdir()
    run("tar", "-C", "source", "-xf", "-", input=packed)
    env = {**os.environ, "CC": "false", "CXX": "false"}  # compiling the index builders takes half a minute
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "./source", env=env)
    (wheel,) = folder.glob("deepy-*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    ours = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = run(python, "-c", ours, stdout=PIPE, text=True).strip()
    Path(packages, "behind.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    run(sys.executable, "-m", "uv", "pip", "install", "-q", "--offline", "--no-deps", "--python", python, wheel)
    return python.parent


def test_from_text_to_transformers(installed: Path, tmp_path: Path) -> None:
    env = environment() | {"PATH": f"{installed}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}

    def deepy(*argv: str, code: int = 0, program: str = "deepy", typed: str = "") -> str:
        done = subprocess.run(
            [installed / program, *argv],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
            input=typed,
        )
        assert done.returncode == code, (argv, done.stdout[-2000:], done.stderr[-3000:])
        return done.stdout + done.stderr

    assert deepy("--version").startswith("deepy 0.")
    where = deepy("-c", "from megatron.home import HOME, LIBRARY; print(HOME, LIBRARY)", program="python")
    assert str(ROOT) not in where and where.split()[0].endswith("site-packages/deepy_home")
    deepy("-c", ALL_HELP.format(paths=[path for path, _ in rows(COMMANDS)]), program="python")
    assert "Did you mean 'train'" in deepy("trian", "tiny.yml", code=2)
    assert "no such config file" in deepy("plan", "tyni.yml", code=2)

    lines = [json.dumps({"text": f"the {word} of number {i}"}) for i in range(150) for word in ("cat", "dog")]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    deepy("tokenizer", "--input", "text.jsonl", "--output", "tok", "--vocab-size", "300")
    tokenizer = ["--tokenizer-type", "HFTokenizer", "--vocab-file", "tok/tokenizer.json"]
    deepy("tokenize", "--input", "text.jsonl", "--output", "data/text", *tokenizer, "--append-eod")
    data = ["data_path=data/text_text_document", "vocab_file=tok/tokenizer.json"]
    assert "== would run" in deepy("plan", "tiny.yml", *SMALL, *data)  # a config that comes with Deepy

    deepy("new", "--data", "text.jsonl", "--tokenizer", "tok", "--size", "300K", "--valid", "0.2", "-o", "run.yml")
    deepy("train", "run.yml", *SHORT, "exit_interval=3", "--log-interval", "1")
    run = tmp_path / "run/checkpoints"
    assert (run / "latest").read_text().strip() == "global_step3"
    deepy("train", "run.yml", *SHORT)
    assert (run / "latest").read_text().strip() == "global_step4"
    deepy("generate", "run.yml", "--prompt", "the", "--output", "out.jsonl", "maximum_tokens=4")
    assert json.loads((tmp_path / "out.jsonl").read_text())["context"] == "the"
    assert deepy("chat", "run.yml", typed="the cat\n").strip()
    assert "logit difference" in deepy("export", "--input", "run/checkpoints", "--output", "hf")
    load = "import transformers as t; print(t.AutoModelForCausalLM.from_pretrained('hf').config.model_type)"
    assert deepy("-c", load, program="python").splitlines()[0] == "llama"
