"""`deepy new`: from files of text to a run that trains; called again, wrongly, and after it was killed."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron.data.tokenise.inputs import find_inputs
from megatron.data.tokens.indexed import IndexedDataset
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.recipes.new_cli import main
from megatron.tokenizer import create_tokenizer
from tests.documented import ROOT
from tests.warm_python import WarmPython

pytestmark = pytest.mark.cpu

WORDS = [a + b for a in ("ka", "lo", "mi", "nu", "pe", "ro", "sa", "ti") for b in ("la", "ren", "tos", "vin", "dor")]


def texts(count: int, words: int = 300) -> list[str]:
    rng = random.Random(1)
    return [f"text {i}: " + " ".join(rng.choices(WORDS, k=words)) for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of texts and source code, to be called from."""
    for i, text in enumerate(texts(60)):
        path = tmp_path / "texts" / f"part{i % 3}" / (f"{i}.md" if i % 2 else f"{i}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "texts/code.py").write_text("print('héllo')\n" * 20)
    (tmp_path / "texts/.hidden.txt").write_text("secret " * 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, without its handler of SIGTERM."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return lambda *argv: main([*map(str, argv)])


def refused(new: Callable[..., int], *argv: object) -> str:
    from megatron.errors import UserError

    with pytest.raises(UserError) as caught:
        new(*argv)
    return str(caught.value)


def read(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))]


def test_a_folder_becomes_a_run(folder: Path, new: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert new("--data", "texts", "--size", "300K", "-o", "run.yml") == 0
    assert "deepy train run.yml" in capsys.readouterr().out
    text = (folder / "run.yml").read_text()
    assert len(text.splitlines()) < 80 and all(len(line) <= 120 for line in text.splitlines())
    tokenizer = create_tokenizer("HFTokenizer", str(folder / "run/tokenizer"), None)
    args = derive(NeoXArgs.from_files([str(folder / "run.yml")]), Facts(vocab_size=tokenizer.vocab_size))
    assert args.notes == ()
    assert args.schedule.lr_decay_iters == args.training.train_iters
    assert args.data.data_path == str(folder / "run/data/corpus_text_document")
    # Every text is there, exactly; the hidden file is not.
    documents = read(folder / "run/data/corpus_text_document")
    whole = sorted(tokenizer.detokenize(tokens) for tokens in documents)
    joined = "".join(whole)
    assert sum(len(text) for text in texts(60)) + 20 * len("print('héllo')\n") == len(
        joined.replace("<|endoftext|>", "")
    )
    assert joined.count("<|endoftext|>") == 61 and "secret" not in joined
    train, valid = (float(share) for share in args.data.split.split(",")[:2])
    assert (train, valid) == (99, 1) and len(documents) >= 1000  # cut, so that 1 % of them is ten pieces


def test_the_same_texts_give_the_same_tokens_in_any_files(folder: Path, new: Callable[..., int]) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in texts(60)]
    (folder / "a.jsonl").write_text("".join(lines))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.writelines(lines[::-1])
    new("--data", "a.jsonl", "--size", "300K", "--vocab-size", 400, "--valid", "10%", "-o", "a.yml")
    for name, more in (("b", ()), ("c", ("--seed", 5))):
        tokenizer = ("--tokenizer", "a/tokenizer")
        new("--data", "b.jsonl.gz", "--size", "300K", *tokenizer, "--valid", "10%", "-o", f"{name}.yml", *more)
    first, second, third = (read(folder / f"{name}/data/corpus_text_document") for name in "abc")
    assert first == second != third and sorted(first) == sorted(third)
    runs = [yaml.safe_load((folder / f"{name}.yml").read_text()) for name in "ac"]
    assert [run["seed"] for run in runs] == [1234, 5]
    assert runs[1]["vocab_file"] == str(folder / "a/tokenizer")


def test_it_does_not_overwrite_and_uses_what_is_whole(
    folder: Path, new: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("--data", "texts", "--size", "300K", "-o", "run.yml")
    new(*command)
    assert "run.yml exists" in refused(new, *command)
    made = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    new(*command, "--force", "--tokens", "50x")
    said = capsys.readouterr().err
    assert said.count(" is there") == 2 and "often: " in said
    assert {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()} == made
    (folder / "texts/new.txt").write_text("one more text " * 30)  # other data
    new(*command, "--force")
    assert made.keys() == {path for path in (folder / "run").rglob("*") if path.is_file()}
    assert all(path.stat().st_mtime_ns != time for path, time in made.items() if path.name == "made_of.json")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--data", "nothing"), "nothing: no such file"),
        (("--data", "empty"), r"empty: no file of a known kind.*\.parquet.*\.md"),
        (("--data", "binary"), "no text to train a tokenizer on"),
        (("--data", "none.txt"), "no text to train a tokenizer on"),
        (("--data", "texts", "-o", "tiny.txt/run.yml"), "tiny.txt is no folder to write in"),
        (("--data", "tiny.txt", "--valid", "0"), "less than one sample"),
        (("--data", "tiny.txt"), "more text"),
        (("--data", "bad.jsonl"), r"bad\.jsonl:2: "),
        (("--data", "texts", "--size", "many"), "--size many: is a number, such as 300K or 2B, not 'many'"),
        (("--data", "texts", "--tokens", "x"), "--tokens x"),
        (("--data", "texts", "--hours", "0"), "--hours 0"),
        (("--data", "texts", "--valid", "80%"), "--valid 80%"),
        (("--data", "texts", "--tokenizer", "none.json"), "--tokenizer none.json: no such file"),
        (("--data", "texts", "-o", "run.txt"), "ends with .yml"),
        (("--data", "texts", "--sizes", "1M"), "--size"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, new: Callable[..., int], flags: tuple[str, ...], said: str) -> None:
    import re

    (folder / "empty").mkdir()
    (folder / "binary").mkdir()
    (folder / "binary/a.txt").write_bytes(bytes(range(256)) * 10)
    (folder / "tiny.txt").write_text("a few words")
    (folder / "none.txt").touch()
    (folder / "bad.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n' + '{"text": "word word"}\n' * 50)
    size = () if "--size" in flags else ("--size", "300K")
    assert re.search(said, refused(new, *size, *flags))
    assert not list(folder.glob("run.*"))


def test_too_little_data_is_said(folder: Path, new: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    new("--data", "texts", "--size", "30M", "-o", "run.yml")
    said = capsys.readouterr().err
    assert "tokens per parameter" in said and "4 epochs" in said


def test_hours_limit_the_run(folder: Path, new: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.recipes import machine as machines

    steps = {}
    for speed in (1e10, 2e10):
        machine = machines.Machine("a test", 1, False, 1e9, speed, "fp32")
        monkeypatch.setattr(machines, "look", lambda width, context, machine=machine: machine)
        new("--data", "texts", "--size", "300K", "--hours", "0.001", "--tokens", "1B", "-o", "run.yml", "--force")
        run = yaml.safe_load((folder / "run.yml").read_text())
        steps[speed] = run["train_iters"] * run["train_batch_size"]
    assert steps[2e10] == pytest.approx(2 * steps[1e10], rel=0.1)


@pytest.mark.parametrize(("gpus", "used"), [(6, 4), (64, 8)])
def test_a_batch_is_divided_among_gpus(
    folder: Path, new: Callable[..., int], monkeypatch, gpus: int, used: int
) -> None:
    """Of GPUs that the batch is not divided among, as many as it is take part."""
    from megatron.recipes import machine as machines

    monkeypatch.setattr(
        machines, "look", lambda width, context: machines.Machine("X", gpus, True, 8e10, 1e12 * gpus, "bfloat16")
    )
    new("--data", "texts", "--size", "300K", "--tokens", "2M", "-o", "run.yml")
    text = (folder / "run.yml").read_text()
    run = yaml.safe_load(text)
    assert (run["num_gpus"], run["train_batch_size"]) == (used, 8) and f"machine: {used} of X" in text
    args = derive(NeoXArgs.from_files([str(folder / "run.yml")]), Facts(vocab_size=512, num_devices=used))
    assert args.parallel.world_size == used


def test_killed_and_called_again(tmp_path: Path) -> None:
    """Killed at any moment it leaves no run.yml; the next call makes what an undisturbed one does."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(3000, 150)))
    command = [
        sys.executable,
        "-m",
        "megatron.recipes.new_cli",
        "--data",
        "in.jsonl",
        "--size",
        "300K",
        "--vocab-size",
        "400",
    ]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    killed = 0
    for seconds in (2.0, 3.0):
        process = subprocess.Popen(
            [*command, "-o", "run.yml"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds)
        killed += process.poll() is None
        process.kill()
        process.wait()
    assert killed
    for name in ("run", "other"):
        if not (tmp_path / f"{name}.yml").exists():
            subprocess.run([*command, "-o", f"{name}.yml"], cwd=tmp_path, env=environment, check=True, timeout=120)
    for file in ("tokenizer/tokenizer.json", "data/corpus_text_document.bin", "data/corpus_text_document.idx"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    assert not [path for path in (tmp_path / "run").rglob("*") if "partial" in path.name or ".ordered" in path.name]


@pytest.mark.slow
def test_two_steps_of_training(folder: Path, warm_python: WarmPython) -> None:
    """Through the commands, from another folder: the file's paths are its own."""
    command = f"new --data {folder}/texts --family qwen3 --size 500K --valid 10% -o {folder}/here/run.yml"
    done = warm_python.run(f"cd {ROOT} && python -m megatron.commands.cli {command}", folder)
    assert done.returncode == 0, done.stderr
    (folder / "elsewhere").mkdir()
    short = "train_iters=2 eval_interval=2 checkpoint_factor=2 log_interval=1"
    done = warm_python.run(f"python {ROOT}/train.py ../here/run.yml {short}", folder / "elsewhere")
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line) for line in (folder / "here/run/checkpoints/metrics.jsonl").read_text().splitlines()]
    first = next(row["train/lm_loss"] for row in losses)
    size = create_tokenizer("HFTokenizer", str(folder / "here/run/tokenizer"), None).vocab_size
    assert abs(first - np.log(size)) < 0.5  # nothing is learned yet
    assert "--shuffle" not in done.stderr  # validation is a fair sample already
    assert list((folder / "elsewhere").iterdir()) == []


def test_what_it_made_and_what_runs_wrote_is_no_text(folder: Path, new: Callable[..., int]) -> None:
    """Called where the texts are, again after a run, and for a second run."""
    command = ("--data", ".", "--size", "300K", "-o")
    new(*command, "my run.yml")
    first = read(folder / "my run/data/corpus_text_document")
    (folder / "my run/checkpoints").mkdir()
    (folder / "my run/checkpoints/metrics.jsonl").write_text('{"step": 1}\n')
    new(*command, "my run.yml", "--force")
    assert read(folder / "my run/data/corpus_text_document") == first
    new(*command, "second.yml")
    assert read(folder / "second/data/corpus_text_document") == first


def test_folders_of_texts(tmp_path: Path) -> None:
    """Source code and markup count for `texts`, unless there are files of many documents."""
    for name in ("a.txt", "b.py", "sub/c.MD", ".git/d.txt", "e.bin", "f.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(texts: bool) -> set[str]:
        return {path.relative_to(tmp_path).as_posix() for path in find_inputs([str(tmp_path)], texts=texts)}

    assert names(True) == {"a.txt", "b.py", "sub/c.MD"}
    assert names(False) == {"a.txt", ".git/d.txt", "f.json"}
    (tmp_path / "g.jsonl").write_text("{}")
    assert "b.py" not in names(True) and "g.jsonl" in names(True)
