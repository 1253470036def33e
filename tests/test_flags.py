"""The parser that all commands share: one spelling of flags, and errors that help."""

from __future__ import annotations

import pytest

from megatron.errors import UserError
from megatron.flags import Parser

pytestmark = pytest.mark.cpu


def parser(**options: bool) -> Parser:
    flags = Parser(prog="tool", **options)
    flags.add_argument("--output_dir", required=True)
    flags.add_argument("--output-base", default="data")
    flags.add_argument("--max-shard-size", type=int)
    return flags


@pytest.mark.parametrize(
    "given",
    [
        ["--output-dir", "x", "--max_shard_size", "3"],
        ["--output_dir=x", "--max-shard_size=3"],
        ["--output", "x", "--max_shard", "3"],
        ["--max", "3", "--output=x"],
    ],
)
def test_spellings_of_a_flag(given: list[str]) -> None:
    known = parser().parse_args(given)
    assert (known.output_dir, known.output_base, known.max_shard_size) == ("x", "data", 3)


def test_values_and_what_follows_two_dashes_stay_as_they_are() -> None:
    flags = parser()
    flags.add_argument("rest", nargs="*")
    known = flags.parse_args(["--output", "a_b-c", "--", "--max_shard_size"])
    assert known.output_dir == "a_b-c" and known.rest == ["--max_shard_size"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--outptu_dir", "x"],
            r"tool: unrecognized arguments: --outptu_dir. Did you mean '--output_dir'\? \(see tool --help",
        ),
        (["--zzz"], r"tool: unrecognized arguments: --zzz \(see tool --help\)"),
        (["--output", "x", "--max-shard-size", "y"], "invalid int value: 'y'"),
        ([], "required: --output_dir"),
        (["--output", "x", "y"], "unrecognized arguments: y"),
    ],
)
def test_errors(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parser().parse_args(given)


def test_without_abbreviations() -> None:
    with pytest.raises(UserError, match="--max_shard"):
        parser(allow_abbrev=False).parse_args(["--output", "x", "--max_shard", "3"])
