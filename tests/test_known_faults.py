"""documentation/KNOWN_FAULTS.md: every fault that has to be held is in it, and every test it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "documentation" / "KNOWN_FAULTS.md"
NUMBERS = """
    1 2 3 4 5 8 15 16 20 21 22 24 27 28 29 31 32 33 35 36 38 39 40 41 44 46 47 48 50 55 56 58 59 61 63 64 65 67 68 70
    71 72 73 75 76 77 80 84 85 86 D1 D2 D3 D4 D5 D6 D7 D8 D9 D10 D11 D12
"""
REQUIRED = NUMBERS.split()


def rows() -> dict[str, list[str]]:
    """Number of a fault -> the other cells of its row."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    numbers = [row[0] for row in cells]
    assert len(numbers) == len(set(numbers)), "a fault is listed twice"
    return {row[0]: row[1:] for row in cells}


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_fault_is_there_in_order() -> None:
    found = list(rows())
    assert [number for number in found if number in REQUIRED] == REQUIRED
    assert set(found) >= set(REQUIRED)


@pytest.mark.parametrize("number", rows())
def test_the_tests_that_hold_it_exist(number: str) -> None:
    symptom, behaviour, held_by = rows()[number]
    assert symptom and behaviour
    named = re.findall(r"`([^`]+)`", held_by)
    assert named and not re.sub(r"`[^`]+`,? ?", "", held_by)
    for test in named:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), f"{number}: there is no {path}"
        assert name in names_in(path), f"{number}: there is no {name} in {path}"
