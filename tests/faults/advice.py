"""Advice of messages, typed: what its tests share. The dry run refuses what the run refuses (test_cli)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.commands import deepy_here

NEW = "save=new"  # "another `save`"


@dataclass(frozen=True)
class Row:
    """Overrides `given` (divided by |) bring a message that matches `says`; then those of `typed`, with its groups,
    replace them or are added; `-key` leaves one out. `prepare` and `then` do in the folder what is no override."""

    name: str
    given: str
    says: str
    typed: str = ""
    prepare: Callable[[Path], object] = lambda folder: None
    then: Callable[[Path], object] = lambda folder: None
    script: str = "train.py"
    flag: str = "--dry-run"


@dataclass
class Typist:
    """Types commands in a folder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def type(self, given: list[str], row: Row) -> tuple[int, str, str]:
        return deepy_here(self.monkeypatch, self.capfd, self.folder, *given, row.flag, script=row.script)

    def follow(self, row: Row, *always: str) -> None:
        row.prepare(self.folder)
        given = [*always, *_list(row.given.format())]
        code, _, err = self.type(given, row)
        found = re.search(row.says, err[err.find("error: ") :], re.DOTALL)
        assert code == 2 and found, f"{code} {err}"
        typed = _list(row.typed.format(*found.groups()))
        replaced = {one.partition("=")[0].removeprefix("-") for one in typed}
        again = [one for one in given if one.partition("=")[0] not in replaced]
        again += [one for one in typed if not one.startswith("-")]
        row.then(self.folder)
        code, out, err = self.type(again, row)
        assert code == 0 and out, f"{again}: {err}"


def _list(text: str) -> list[str]:
    return text.split(" | ") if text else []
