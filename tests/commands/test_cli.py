"""The command `deepy`: its table, its help, typos, completion, and how little it costs to start."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands.cli import as_deepy, run
from megatron.commands.table import COMMANDS, rows
from megatron.errors import UserError
from megatron.home import HOME

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])


@pytest.mark.parametrize("path", [path for path, _ in rows(COMMANDS)], ids=" ".join)
def test_help_of_every_command_teaches_by_what_one_types(path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        run([*path, "--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert text.startswith(("usage: deepy", "Look at data"))
    if path != ("demo",):
        assert f"\n{' '.join(('deepy', *path))} " in text.replace("\n    ", "\n").replace("\n  ", "\n")
    assert [row.where for _, row in rows(COMMANDS) if f"python {row.where}" in text] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian", "tiny.yml"], "Did you mean 'train'"),
        (["data", "merg"], "Did you mean 'merge'"),
        (["verify", "a", "b", "--iterations", "3"], "Did you mean '--iteration'"),
        (["tokenize", "--append-eot", "--input", "x"], "Did you mean '--append-eod'"),
        (["train", "tiny.yml", "trian_iters=3"], "Did you mean 'train_iters'"),
        (["train", "tiny.yml", "--trian_iters", "3"], "Did you mean '--train_iters'"),
        (["plan", "tyni.yml"], "tyni.yml: no such config file"),
        (["plan", "lama/7B.yml"], r"lama/7B\.yml: no such config file\. Did you mean 'llama/7B\.yml'"),
        (["explain", "lerning_rate"], "Did you mean 'learning_rate'"),
        (["data", "verify", "nowhere"], "1 of 1 datasets"),
        (["report", "nowhere"], "nowhere"),
        (["--verbose"], "--verbose"),
        (["chat", "tiny.yml", "--host", "0.0.0.0"], "--url"),
        (["chat", "tiny.yml", "--dry-run"], "--url"),
    ],
)
def test_wrong_input_names_what_was_meant(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(argv)


def test_the_scripts_of_commands_are_ours_whatever_lies_here(tmp_path, monkeypatch, capsys) -> None:
    """Many folders have a train.py."""
    (tmp_path / "train.py").write_text("raise SystemExit('another program')")
    (tmp_path / "run.yml").write_text("train_iters: 3\n")
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("megatron.commands.launch_cli.start", lambda *given: started.append(given) or 0)
    assert run(["train", "run.yml"]) == 0
    assert started == [(str(HOME / "train.py"), ["run.yml"], [])]


def test_dashes_and_underscores_are_the_same_in_commands(capsys) -> None:
    with pytest.raises(SystemExit):
        run(["inspect_ckpt", "--help"])
    assert "usage: deepy inspect-ckpt" in capsys.readouterr().out


def test_a_key_is_explained_with_and_without_a_config(capsys) -> None:
    run(["explain", "train_iters"])
    assert "train_iters = null" in capsys.readouterr().out
    run(["explain", "seed", "tiny.yml", "train_iters", "train-iters=7"])
    shown = capsys.readouterr().out
    assert "train_iters = 7" in shown and "seed = " in shown


def test_mixtures_are_listed_and_shown_by_share(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtures").mkdir()
    text = "mixture: {sources: {a: x/a, b: {path: x/b, max_epochs: 2}}, weights: [[0, {a: 3, b: 1}], [50, {b: 2}]]}\n"
    (tmp_path / "mixtures/mine.yml").write_text(text)
    run(["data", "mixtures"])
    listed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert listed["mine"] == "mixtures/mine.yml" and Path(listed["pile"]).is_file()
    run(["data", "mixtures", "mine"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2:4] == [["a", "75.00%", "0.00%", "x/a"], ["b", "25.00%", "100.00%", "x/b,", "max_epochs", "2.0"]]
    with pytest.raises(UserError, match="no file for 'theirs'"):
        run(["data", "mixtures", "theirs"])


def test_the_names_in_a_text_become_those_of_the_command() -> None:
    text = "python deepy.py train.py a.yml; python tools/datasets/merge_datasets.py --input a; torchrun train.py"
    assert as_deepy(text) == "deepy train a.yml; deepy data merge --input a; torchrun train.py"


def test_it_starts_at_once_and_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for argv in (["--help"], ["--version"], ["trian"]):
        code = (
            "import sys\nfrom megatron.commands.cli import run\n"
            f"try: run({argv})\nexcept Exception as error: print(error)\n"
            "print(sorted({'torch', 'numpy', 'yaml', 'transformers'} & {*sys.modules}))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / 3
    assert used < 0.5


def test_no_help_waits_for_torch() -> None:
    code = (
        "import sys\nfrom megatron.commands.cli import run\nfrom megatron.commands.table import COMMANDS, rows\n"
        "for path, _ in rows(COMMANDS):\n"
        "    try: run([*path, '--help'])\n    except SystemExit: pass\n"
        "    if loaded := {'torch', 'transformers', 'deepspeed'} & {*sys.modules}: sys.exit(f'{path}: {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage: deepy demo" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [("deepy tr", "train"), ("deepy verify --conf", "--config-file"), ("deepy train --train-it", "--train-iters")],
)
def test_a_shell_completes(words: str, offered: str) -> None:
    env = {**os.environ, "_DEEPY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv = ['deepy']; from megatron.commands.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, env=env, capture_output=True, text=True, timeout=60)
    assert f"plain,{offered}" in done.stdout.splitlines(), done
