"""Command lines of the benchmarks: every flag is explained, wrong input costs no measuring."""

from __future__ import annotations

import argparse
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import UserError
from tests.tools.command import ROOT

pytestmark = pytest.mark.cpu

BENCH = ROOT / "tools" / "bench"
TOOLS = sorted(path.stem for path in BENCH.glob("*.py") if "ArgumentParser(" in path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    monkeypatch.setattr("megatron.errors.keep_writing", lambda *names: None)
    yield
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture
def code_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a tool to its exit code."""

    def code(tool: str, *arguments: object) -> Any:
        monkeypatch.setattr(sys, "argv", [f"{tool}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(BENCH / f"{tool}.py"), run_name="__main__")
        return end.value.code

    return code


@pytest.mark.parametrize("tool", TOOLS)
def test_every_flag_is_explained_with_its_default(
    code_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tool: str
) -> None:
    parsers: list[argparse.ArgumentParser] = []
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(
        argparse.ArgumentParser, "parse_args", lambda parser: (parsers.append(parser), parse(parser))[1]
    )
    assert code_of(tool, "--help") == 0
    shown = [one for one in parsers[0]._actions if one.help != argparse.SUPPRESS]
    assert len(shown) > 1
    for one in shown:
        assert one.help, one.dest
        assert one.default in (None, False, [], argparse.SUPPRESS) or "default" in one.help, one.dest
    for one in shown:
        if one.type is not None and getattr(one.type, "__name__", "") == "positive" or one.type is int:
            assert code_of(tool, one.option_strings[0], -1) == 2, one.dest
    capsys.readouterr()


@pytest.mark.parametrize("flag", ["--ranks 0", "--stage 7", "--against {}", "--against {}/missing", "--rounds 0"])
def test_checkpoint_measures_only_what_there_is(
    code_of: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert code_of("checkpoint", *flag.format(tmp_path).split()) == 2
    assert f"argument {flag.split()[0]}: " in capsys.readouterr().err


def test_checkpoint_measures_no_other_checkout(tmp_path: Path) -> None:
    import checkpoint

    with pytest.raises(AssertionError, match="is measured"):
        checkpoint.measure(Namespace(source=tmp_path, rank=0, ranks=1, folder=tmp_path))


def test_checkpoint_repeats_what_a_rank_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import checkpoint

    rank = tmp_path / "rank.py"
    rank.write_text("import sys\nprint('a warning\\nerror: hidden_size: wrong', file=sys.stderr)\nsys.exit(2)\n")
    monkeypatch.setattr(checkpoint, "__file__", str(rank))
    with pytest.raises(UserError, match="^hidden_size: wrong$"):
        checkpoint.one_round(Namespace(ranks=1, layers=1, hidden=130, stage=1), ROOT)


def test_train_step_measures_plain_whatever_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_step

    monkeypatch.setattr(train_step, "CONTENDERS", dict.fromkeys(("plain", "native"), lambda *_: lambda: None))
    monkeypatch.setattr(train_step, "prepare", lambda threads: None)
    once = ["--rounds", "1", "--shape", "small", "--precision", "fp32", "--no-memory"]
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--contenders", "native", *once])
    train_step.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]] == ["plain", "native"]


@pytest.mark.parametrize("tool", TOOLS)
def test_errors_are_one_message(tool: str) -> None:
    assert (BENCH / f"{tool}.py").read_text(encoding="utf-8").rstrip().splitlines()[-1].startswith("    run_cli(")
