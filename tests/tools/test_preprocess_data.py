"""`tools/datasets/*.py` and `prepare_data.py` as commands: flags, messages, exit codes, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.data.tokens.indexed import IndexedDataset
from tests.tokenizer.vocabularies import write_gpt2, write_json
from tests.tools.command import ROOT, run

pytestmark = pytest.mark.cpu

TOOL = "tools/datasets/preprocess_data.py"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "corpus.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": f"hello world {i}", "title": f"t{i}"}) + "\n" for i in range(50)))
    return path


def test_the_command_of_neox_users(tmp_path: Path, corpus: Path) -> None:
    vocab, merges = write_gpt2(tmp_path / "gpt2")
    done = run(
        *(TOOL, "--input", corpus, "--output-prefix", tmp_path / "out" / "c", "--vocab", vocab),
        *("--merge-file", merges, "--dataset-impl", "mmap", "--tokenizer-type", "GPT2BPETokenizer"),
        *("--append-eod", "--workers", 2, "--num-docs", 50, "--log-interval", 10, "--jsonl-keys", "text", "title"),
    )
    datasets = [f"c_{key}_document.{end}" for key in ("text", "title") for end in ("bin", "idx", "manifest.json")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*datasets, "c_metadata.json"])
    metadata = json.loads((tmp_path / "out" / "c_metadata.json").read_text())
    assert metadata["document_counts"] == {"c_text_document": 50, "c_title_document": 50}
    assert metadata["output_files"] == datasets
    texts, titles = (IndexedDataset(tmp_path / "out" / f"c_{key}_document") for key in ("text", "title"))
    assert len(texts) == len(titles) == 50
    assert titles.get(7).tolist()[-1] == 264
    assert f"c_text_document: 50 documents, {texts.num_tokens} tokens, uint16" in done.stdout
    assert "eod 264" in done.stderr
    done_line = r"tokenising: done in \d+:\d\d, 50 docs \(\d+ docs/s\), [\d.]+ MB/s, \d+ tokens \(\S+ tokens/s\)"
    assert re.search(done_line, done.stderr)


def test_lists_and_globs(tmp_path: Path, corpus: Path) -> None:
    other = corpus.with_name("other.jsonl")
    other.write_text('{"text": "x"}\n')
    common = ("--tokenizer-type", "bytes")
    run(TOOL, "--input", f"{corpus},{other}", "--output-prefix", tmp_path / "a", *common)
    run(TOOL, "--input", f"{corpus.parent}/*.jsonl", "--output-prefix", tmp_path / "b", *common)
    assert len(IndexedDataset(tmp_path / "a_text_document")) == 51
    for end in ("bin", "idx"):
        assert (tmp_path / f"a_text_document.{end}").read_bytes() == (tmp_path / f"b_text_document.{end}").read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--input", "{absent}"], "absent.jsonl: "),
        (["--input", "{notes}"], "notes.md: "),
        (["--input", "{empty}"], "key 'text'"),
        (["--jsonl-keys", "body"], "corpus.jsonl:1: "),
        (["--jsonl-keys", "text", "text"], "--jsonl-keys text text"),
        (["--dataset-impl", "lazy"], "--dataset-impl lazy"),
        (["--workers", "0"], "--workers 0"),
        (["--save-every", "nan"], "--save-every nan"),
        (["--num-docs", "-1"], "--num-docs -1"),
        (["--shard", "4/4"], "--shard 4/4: "),
        (["--shard", "auto"], "--shard auto: "),
        (["--output-prefix", "{corpus}/c"], "--output-prefix"),
        (["--tokenizer-type", "HFTokenizer"], "vocab_file"),
        (["--tokenizer-type", "Chars"], "tokenizer_type: 'Chars'"),
        (["--tokenizer-type", "HFTokenizer", "--vocab-file", "{noeod}"], "--append-eod"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(tmp_path: Path, corpus: Path, flags: list[str], said: str) -> None:
    from tests.tokenizer.vocabularies import byte_level

    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.md").write_text("x")
    write_json(tmp_path / "noeod.json", byte_level(("<s>",)))
    paths = {"absent": "absent.jsonl", "notes": "notes.md", "empty": "empty.jsonl", "noeod": "noeod.json"}
    given = [flag.format(corpus=corpus, **{name: tmp_path / file for name, file in paths.items()}) for flag in flags]
    common = ["--input", corpus, "--tokenizer-type", "bytes", "--append-eod", "--output-prefix", tmp_path / "out" / "c"]
    done = run(TOOL, *common, *given, check=2)
    assert said in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_skip_bad_lines_counts(tmp_path: Path, corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write('{"txt": 1}\n{\n{"text": ""}\n')
    common = (TOOL, "--input", corpus, "--output-prefix", tmp_path / "c", "--tokenizer-type", "bytes")
    assert "corpus.jsonl:51: " in run(*common, check=2).stderr
    done = run(*common, "--skip-bad-lines")
    assert "1 empty documents, 2 unusable records" in done.stderr
    assert "50 documents" in done.stdout


def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    corpus.write_text(json.dumps({"text": "x" * 100_000}) + "\n")
    common = (TOOL, "--input", corpus, "--output-prefix", tmp_path / "out" / "c", "--tokenizer-type", "bytes")
    said = run(*common, check=6, largest_file=50_000).stderr
    assert "out/c_text_document: File too large. Nothing was written." in said
    assert "Traceback" not in said
    assert not list((tmp_path / "out").iterdir())


def start_on_a_pipe(tmp_path: Path, workers: int) -> tuple[subprocess.Popen[str], int]:
    """The tool reading from a named pipe that stays open: it cannot finish. Returns it and the writing end."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    command = [sys.executable, TOOL, "--input", pipe, "--output-prefix", tmp_path / "out" / "c", "--workers", workers]
    process = subprocess.Popen(
        [*map(str, command), "--tokenizer-type", "bytes"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    return process, os.open(pipe, os.O_WRONLY)


def feed(end: int, megabytes: int) -> None:
    os.write(end, b"".join(b'{"text": "%s"}\n' % (b"x" * 1000) for _ in range(1000 * megabytes)))


def wait_for_temporary_files(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while not list(folder.glob("*.bin.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(process: subprocess.Popen[str], end: int) -> str:
    """End its input; what it wrote on stderr, once it is gone."""
    os.close(end)
    try:
        return process.communicate(timeout=20)[1]
    finally:
        process.kill()


def test_a_killed_worker_ends_the_command_in_seconds(tmp_path: Path) -> None:
    import psutil

    process, end = start_on_a_pipe(tmp_path, 2)
    feed(end, 4)
    wait_for_temporary_files(tmp_path / "out")
    started = time.monotonic()
    psutil.Process(process.pid).children()[0].kill()
    with contextlib.suppress(BrokenPipeError):  # it may have left already
        feed(end, 4)
    said = stop(process, end)
    assert process.returncode == 1
    assert time.monotonic() - started < 40
    assert "a worker process died" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "out").iterdir())


def test_a_terminated_command_removes_its_temporary_files(tmp_path: Path) -> None:
    process, end = start_on_a_pipe(tmp_path, 1)
    feed(end, 2)
    wait_for_temporary_files(tmp_path / "out")
    process.send_signal(signal.SIGTERM)
    stop(process, end)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list((tmp_path / "out").iterdir())


def test_help_teaches() -> None:
    for tool in (TOOL, "prepare_data.py", *(f"tools/datasets/{n}.py" for n in ("merge_datasets", "train_tokenizer"))):
        said = run(tool, "--help").stdout
        assert f"python {tool} " in said


def test_train_tokenize_count_and_merge(tmp_path: Path, corpus: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    done = run(
        *("tools/datasets/train_tokenizer.py", "--json_input_dir", corpus.parent),
        *("--tokenizer_output_path", tokenizer, "--tokenizer_type", "BPE", "-v", 265),
    )
    assert f"{tokenizer}: vocabulary 265" in done.stdout
    for part in "ab":
        prefix = tmp_path / "parts" / part
        run(TOOL, "--input", corpus, "--output-prefix", prefix, "--tokenizer-type", "HFTokenizer", "--vocab", tokenizer)
    count = "tools/datasets/dataset_token_count.py"
    data = IndexedDataset(tmp_path / "parts" / "a_text_document")
    one, size = data.num_tokens, 2 * data.num_tokens + 34 + 12 * 50 + 8 * 51
    prefixes = [tmp_path / "parts" / f"{part}_text_document" for part in "ab"]
    lines = [
        *(f"{prefix}: {one} tokens, 50 documents, uint16, {size} bytes" for prefix in prefixes),
        f"total: {2 * one} tokens, 100 documents, {2 * size} bytes",
    ]
    assert run(count, *prefixes).stdout.splitlines() == lines
    assert run(count, tmp_path / "parts").stdout.splitlines() == lines
    counted = json.loads(run(count, f"{tmp_path}/parts/?_text_document", "--json").stdout)
    assert counted["total"] == {"tokens": 2 * one, "documents": 100, "bytes": 2 * size}
    row = {"prefix": str(prefixes[1]), "tokens": one, "documents": 50, "dtype": "uint16", "bytes": size}
    assert counted["datasets"][1] == row
    run("tools/datasets/merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "whole")
    assert run(count, tmp_path / "whole.bin").stdout.startswith(f"{tmp_path / 'whole.bin'}: {2 * one} tokens, 100 doc")
    assert f"{tmp_path}/absent" in run(count, tmp_path / "absent", check=2).stderr
    assert f"{corpus.parent}" in run(count, corpus.parent, check=2).stderr


def test_a_trained_tokenizer_is_a_complete_folder(tmp_path: Path, corpus: Path) -> None:
    from transformers import AutoTokenizer

    train = ("tools/datasets/train_tokenizer.py", "--json_input_dir", corpus, "-v", 300, "--normalizer", "none")
    for name in ("one", "two"):
        run(*train, "--tokenizer_output_path", tmp_path / name)
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == names
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", 0)
    assert (theirs.pad_token, theirs.pad_token_id) == ("<|padding|>", 1)
    text = "hello world 7  \u00e9 hello"
    assert theirs.decode(theirs(text)["input_ids"]) == text
    run(
        *(TOOL, "--input", corpus, "--output-prefix", tmp_path / "c", "--append-eod"),
        *("--tokenizer-type", "HFTokenizer", "--vocab-file", tmp_path / "one"),
    )
    assert IndexedDataset(tmp_path / "c_text_document")[3].tolist() == [*theirs("hello world 3")["input_ids"], 0]


def test_a_tokenizer_is_not_trained_on_what_cannot_be_read(tmp_path: Path, corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write("{\n")
    train = ("tools/datasets/train_tokenizer.py", "--json_input_dir", corpus, "--tokenizer_output_path", tmp_path / "t")
    assert "corpus.jsonl:51: " in run(*train, "-v", 300, check=2).stderr
    assert not (tmp_path / "t").exists()
    assert "1 unusable" in run(*train, "-v", 300, "--skip-bad-lines").stderr


def test_prepare_data_says_what_it_cannot_do(tmp_path: Path) -> None:
    done = run("prepare_data.py", "stdlb", "-d", tmp_path, check=2)
    assert "Did you mean 'stdlib'?" in done.stderr
    done = run("prepare_data.py", "-d", tmp_path / "data", "-t", "GPT2BPETokenizer", "enwik8", check=2)
    assert "python prepare_data.py stdlib" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()
