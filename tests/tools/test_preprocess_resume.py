"""`preprocess_data.py` killed in the middle, shared out among processes, on a disk that is full: as commands."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.command import ROOT, run

pytestmark = pytest.mark.cpu

TOOL = "tools/datasets/preprocess_data.py"
MERGE = "tools/datasets/merge_datasets.py"
ENDS = (".bin", ".idx", ".manifest.json")


def write_corpus(path: Path, megabytes: float, seed: int = 0) -> Path:
    """JSON lines of made-up words, of lengths that differ a lot."""
    pick = random.Random(seed)
    words = ["".join(pick.choices("abcdefghij", k=pick.randint(1, 9))) for _ in range(500)]
    size = 0
    with path.open("w") as file:
        while size < megabytes * 1e6:
            size += file.write(json.dumps({"text": " ".join(pick.choices(words, k=pick.randint(1, 400)))}) + "\n")
    return path


def command(corpus: Path, prefix: Path, *more: object) -> list[str]:
    flags = ("--input", corpus, "--output-prefix", prefix, "--tokenizer-type", "CharLevelTokenizer", "--append-eod")
    return [*map(str, (TOOL, *flags, *more))]


def same(one: Path, other: Path, key: str = "text") -> bool:
    pairs = ((Path(f"{p}_{key}_document{end}") for p in (one, other)) for end in ENDS)
    return all(a.read_bytes() == b.read_bytes() for a, b in pairs)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_by_force_and_resumed(tmp_path: Path, workers: int) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 80)  # MB: about a second, so that it is not over when it is killed
    out = tmp_path / "out"
    again = command(corpus, out / "c", "--workers", workers, "--save-every", "0.05")
    journal = out / "c.resume.partial"
    for _ in range(2):  # the second life starts while workers of the first may still be there
        before = journal.read_bytes() if journal.exists() else b""
        process = subprocess.Popen([sys.executable, *again], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 60
            while not journal.exists() or journal.read_bytes() == before:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.kill()
            process.wait(timeout=20)
        assert process.returncode == -signal.SIGKILL
    assert {path.suffix for path in out.iterdir()} == {".partial"}
    said = run(*again).stderr
    assert re.search(r"resuming .* \d+ documents, \d+ tokens .*--restart", said)
    run(*command(corpus, tmp_path / "straight"))
    assert same(out / "c", tmp_path / "straight")
    assert not list(out.glob("*.partial*"))


def test_interrupted_after_a_save_the_message_says_how_to_resume(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 80)  # MB: about a second, so that it is not over when it is killed
    again = command(corpus, tmp_path / "c", "--save-every", "0.01")
    process = subprocess.Popen([sys.executable, *again], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "c.resume.partial").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert f"{tmp_path}" in said and ".partial" in said
    corpus.write_text('{"text": "another corpus"}\n')
    refused = run(*again, check=2).stderr
    assert "c.resume.partial" in refused and "the input files" in refused
    assert "Traceback" not in refused
    assert "1 documents" in run(*again, "--restart").stdout
    assert not list(tmp_path.glob("*.partial*"))


def test_tasks_of_a_job_and_their_results_joined(tmp_path: Path) -> None:
    """As under `srun --shard auto`: every task the same command, its rank in the environment."""
    corpora = [write_corpus(tmp_path / f"{name}.jsonl", 0.3, seed) for seed, name in enumerate("ab")]
    both = f"{corpora[0]},{corpora[1]}"
    tasks = [
        subprocess.Popen(
            [sys.executable, *command(Path(both), tmp_path / "shards" / "c", "--shard", "auto")],
            cwd=ROOT,
            env={**os.environ, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "3"},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [task.communicate(timeout=60) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    assert "in shard 1/3" in said[1][1]
    done = run(MERGE, "--input", tmp_path / "shards", "--output-prefix", tmp_path / "data" / "c")
    assert str(tmp_path / "data" / "c_text_document: ") in done.stdout
    run(*command(Path(both), tmp_path / "whole"))
    assert same(tmp_path / "data" / "c", tmp_path / "whole")
    for path in (tmp_path / "shards").glob("c_shard_00001_of_00003_text*"):
        path.unlink()
    refused = run(MERGE, "--input", tmp_path / "shards", "--output-prefix", tmp_path / "other", check=2).stderr
    assert re.search(r"c_shard_\*_text_document: .*\b3 shards, 1 .*--shard 1/3\b", refused)
    assert not list(tmp_path.glob("other*"))


def test_two_commands_with_one_output(tmp_path: Path) -> None:
    """The mistake of `srun` without `--shard`: the second is refused, the first continues."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    first = subprocess.Popen(
        [sys.executable, *command(tmp_path / "pipe.jsonl", tmp_path / "c")], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    end = os.open(tmp_path / "pipe.jsonl", os.O_WRONLY)
    try:
        os.write(end, b'{"text": "hello"}\n' * 20_000)
        while not (tmp_path / "c_text_document.bin.partial").exists():
            time.sleep(0.01)
        small = write_corpus(tmp_path / "a.jsonl", 0.01)
        refused = run(*command(small, tmp_path / "c"), check=2).stderr
        assert re.search(rf"{re.escape(str(tmp_path / 'c'))}\S* .*--shard\b", refused)
    finally:
        os.close(end)
        said = first.communicate(timeout=20)[1]
    assert first.returncode == 0, said


@pytest.mark.parametrize("save_every", ["0", "0.001"])
def test_a_disk_that_fills_up(tmp_path: Path, save_every: str) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", 3)
    flags = command(corpus, tmp_path / "out" / "c", "--save-every", save_every)
    said = run(*flags, check=6, largest_file=2_000_000).stderr
    assert said.count("c_text_document: File too large.") == 1
    assert "Traceback" not in said
    left = {path.suffix for path in (tmp_path / "out").iterdir()}
    if save_every == "0":
        assert "Nothing was written." in said
        assert not left
    else:
        assert "same command" in said
        assert left == {".partial"}
    run(*flags)
    run(*command(corpus, tmp_path / "straight"))
    assert same(tmp_path / "out" / "c", tmp_path / "straight")


def peak_memory(corpus: Path, prefix: Path, *more: object) -> float:
    """Megabytes at most, of the command and (in turn) of any worker."""
    code = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True, "
        "capture_output=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    arguments = [sys.executable, "-c", code, *command(corpus, prefix, *more)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout) / 1e3


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Ten times the input, of many tiny documents (the lengths are data too)."""
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_bytes(b'{"text": "ab"}\n' * 100_000)
    large.write_bytes(b'{"text": "ab"}\n' * 1_000_000)
    before, after = (peak_memory(path, tmp_path / path.stem, "--save-every", "0.2") for path in (small, large))
    # Lengths and document borders in memory, 12 bytes a document, would be 11 MB more.
    assert after < before + 6, (before, after)
