"""documentation/looking_at_data.md: every command in it works as written, and prints what the text shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.tokenizer.train import train_bpe
from tests.tools.command import ROOT, run

pytestmark = pytest.mark.cpu

GUIDE = (ROOT / "documentation" / "looking_at_data.md").read_text(encoding="utf-8")
FIRST = "python prepare_data.py stdlib -d data\n"  # half a minute: it has tests of its own


def test_every_command_works(tmp_path: Path) -> None:
    for name in ("tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(sys.executable)
    make_stdlib(tmp_path / "data" / "stdlib")
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert len(blocks) == 8 and blocks[0] == FIRST
    script = "set -e -o pipefail\n" + "".join(blocks).removeprefix(FIRST)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    (shown,) = re.findall(r"```\n(== document 0.*?)```", GUIDE, flags=re.DOTALL)
    number = re.compile(r"\d+")
    assert number.sub("N", shown) in number.sub("N", out)  # another tokenizer has other counts
    assert re.search(r"== sample 17 .*train, step 1 \(iteration 2\b.*, row 1 of 16\n +source +stdlib_text_doc", out)
    assert re.search(r"step 3 \(iteration 4\b.* 48\.\.63 .*train\n +48 \(row 0\) stdlib_text_document \(\./data", out)
    assert re.search(r"^step \d+ .*\n  \d+ \(row \d+\) .*\b317\[\d+:\d+\]", out, flags=re.MULTILINE)
    assert out.endswith("2048 trained tokens in step 0\n")
    lines = (tmp_path / "suspects.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [n for n in range(121, 125) for _ in range(16)]
    assert all((tmp_path / f"{name}.html").stat().st_size > 5000 for name in ("samples", "chats"))


def make_stdlib(folder: Path) -> None:
    """400 short documents and a tokenizer, where prepare_data.py puts the real ones."""
    texts = [f"document {i}\n" + " ".join(f"word {i * j}" for j in range(1, 40)) for i in range(400)]
    train_bpe(texts, 300, folder / "tokenizer.json")
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(
        *("tools/datasets/preprocess_data.py", "--input", source, "--output-prefix", folder / "stdlib"),
        *("--tokenizer-type", "HFTokenizer", "--vocab-file", folder / "tokenizer.json", "--append-eod"),
    )


def test_every_flag_named_exists() -> None:
    source = (ROOT / "megatron" / "plan" / "inspect_arguments.py").read_text()
    source += (ROOT / "tools" / "datasets" / "preprocess_data_with_chat_template.py").read_text()
    source += (ROOT / "megatron" / "data" / "tokenise" / "flags.py").read_text()
    named = set(re.findall(r"--[a-z][a-z-]+", GUIDE))
    assert {flag for flag in named if f'"{flag}"' not in source} == {"--prepare"}


def test_every_flag_is_in_the_guide() -> None:
    source = (ROOT / "megatron" / "plan" / "inspect_arguments.py").read_text()
    flags = set(re.findall(r'"(--[a-z-]+)"', source)) - {"--help", "--step", "--iteration"}
    small = {"--merge-file", "--tokenizer-type", "--npy-eod", "--npy-dtype", "--hostfile", "--color"}  # --help has them
    assert {flag for flag in flags - small if flag not in GUIDE} == set()
