"""`preprocess_data.py --encoder`: what is used is said, what cannot be used is refused, start-up stays light."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tokenizer.zoo import ZOO
from tests.tools.command import ROOT, run

pytestmark = pytest.mark.cpu

TOOL = "tools/datasets/preprocess_data.py"


@pytest.fixture
def flags(tmp_path: Path) -> list[object]:
    corpus, tokenizer = tmp_path / "in.jsonl", tmp_path / "tokenizer.json"
    corpus.write_text("".join(json.dumps({"text": f"hello world {i}"}) + "\n" for i in range(50)))
    ZOO["neox"]().save(str(tokenizer))
    return ["--input", corpus, "--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer, "--append-eod"]


def test_the_log_says_which_encoder_was_taken_and_why_another_was_not(tmp_path: Path, flags: list[object]) -> None:
    outputs = set()
    for encoder, taken in (("auto", ["gigatoken"]), ("fastokens", ["fastokens"]), ("tokenizers", [])):
        done = run(TOOL, *flags, "--output-prefix", tmp_path / encoder, "--encoder", encoder, "--workers", 2)
        assert re.findall(r"encoder: (\w+), .*\btokenizers\b", done.stderr) == taken
        outputs.add((tmp_path / f"{encoder}_text_document.bin").read_bytes())
    assert len(outputs) == 1
    done = run(TOOL, *flags, "--output-prefix", tmp_path / "x", "--encoder", "tiktoken", check=2)
    assert re.search(r"--encoder tiktoken: .*normalizer \(NFC\)", done.stderr)
    assert not list(tmp_path.glob("x*"))


def test_one_line_says_what_is_slow_and_how_to_mend_it(tmp_path: Path, flags: list[object]) -> None:
    train = ("tools/datasets/train_tokenizer.py", "--json_input_dir", flags[1], "-v", 300)
    run(*train, "--tokenizer_output_path", tmp_path / "exact")
    run(*train, "--tokenizer_output_path", tmp_path / "neox", "--normalizer", "nfkc")
    flags = [tmp_path / "neox" if flag == flags[5] else flag for flag in flags]
    slow = run(TOOL, *flags, "--output-prefix", tmp_path / "slow").stderr
    (line,) = (line for line in slow.splitlines() if "encoder:" in line)
    assert re.search(r"tokenizers, some \d+ times slower.*NFKC.*--normalizer none", line)
    assert ".rs:" not in slow
    flags = [tmp_path / "exact" if flag == tmp_path / "neox" else flag for flag in flags]
    assert "encoder: gigatoken, " in run(TOOL, *flags, "--output-prefix", tmp_path / "fast").stderr


def test_without_the_optional_packages_all_works(tmp_path: Path, flags: list[object]) -> None:
    """In a Python that cannot import them."""
    hidden = "\n".join(
        (
            "import runpy, sys",
            "for name in ('gigatoken', 'fastokens', 'tiktoken', 'orjson', 'awkward'): sys.modules[name] = None",
            f"sys.argv = [{TOOL!r}, *sys.argv[1:]]",
            f"runpy.run_path({TOOL!r}, run_name='__main__')",
        )
    )
    done = run("-c", hidden, *flags, "--output-prefix", tmp_path / "without")
    assert re.search("encoder: tokenizers, .*pip install -r .*requirements/requirements-fast-tok", done.stderr)
    run(TOOL, *flags, "--output-prefix", tmp_path / "with")
    for end in (".bin", ".idx", ".manifest.json"):
        one, other = (tmp_path / f"{name}_text_document{end}" for name in ("with", "without"))
        assert one.read_bytes() == other.read_bytes()


def test_nothing_heavy_is_imported(tmp_path: Path, flags: list[object]) -> None:
    command = [sys.executable, "-X", "importtime", TOOL, *map(str, flags), "--output-prefix", str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"numpy", "tokenizers"} <= imported
    assert not imported & {
        "torch",
        "transformers",
        "datasets",
        "deepspeed",
        "pandas",
        "pyarrow",
        "awkward",
        "huggingface_hub",
    }
