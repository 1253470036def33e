"""The command line of tools/datasets/inspect.py."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import UserError, nearest
from megatron.flags import Parser

USAGE = """\
Look at data: what is in a dataset, what a run trains on, and when.

  inspect.py documents PREFIX ...     documents of a dataset, what is trained in them
  inspect.py sample CONF ...          training samples of a run, exactly as the model gets them
  inspect.py steps CONF ...           which samples, of which documents, were in which steps of a run

examples:
  # the first five chats of a dataset, what is trained in [[brackets]], or green on a terminal
  python tools/datasets/inspect.py documents data/chats_messages_document --documents 0:5 \\
      --vocab-file data/stdlib/tokenizer.json
  # what a run reads first, and all of its step 100
  python tools/datasets/inspect.py sample run.yml --sample 0
  python tools/datasets/inspect.py sample run.yml train_iters=2000 --step 100
  # a page with 40 samples spread over the run, for a browser
  python tools/datasets/inspect.py sample run.yml --samples 40 --html samples.html
  # the loss jumped at iterations 1201 to 1204 of the log: what was in them? And when was document 17 read?
  python tools/datasets/inspect.py steps run.yml --iterations 1201..1204
  python tools/datasets/inspect.py steps run.yml --find data/chats_messages_document:17

`COMMAND --help` has more. Results go to stdout, messages to stderr. Exit code 2: the input is wrong.
guide: documentation/looking_at_data.md
"""
COMMANDS = ("documents", "sample", "steps")
_OVERRIDE = re.compile(r"^(--)?[A-Za-z_][A-Za-z0-9_.\-]*=")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with `command`; for the commands about a run also `conf` and `overrides`."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        raise SystemExit(0 if argv else 2)
    command, rest, tool = argv[0], list(argv[1:]), Path(sys.argv[0]).name  # `deepy data inspect` is called so, too
    if command not in COMMANDS:
        raise UserError(
            f"{tool}: {command!r} is no command; there are {', '.join(COMMANDS)}.{nearest(command, list(COMMANDS))}"
        )
    parser = Parser(prog=f"{tool} {command}", allow_abbrev=False, description=_ABOUT[command])
    overrides: list[str] = []
    if command == "documents":
        _of_documents(parser)
    else:
        _of_runs(parser, command)
        flags = {flag for action in parser._actions for flag in action.option_strings}
        own = [_OVERRIDE.match(one) and one.split("=", 1)[0] not in flags for one in rest]
        overrides = [one.removeprefix("--") for one, is_override in zip(rest, own, strict=True) if is_override]
        rest = [one for one, is_override in zip(rest, own, strict=True) if not is_override]
    parsed = parser.parse_intermixed_args(rest)
    parsed.command, parsed.overrides = command, overrides
    return parsed


_ABOUT = {
    "documents": """\
Show documents of a dataset (.bin/.idx, .npy, or a quoted pattern of several). Labels and rewards next to it under the
names that the tools of tools/datasets write are found, and so is the other side of a preference pair.
Without --vocab-file or --tokenizer-type only ids are shown.""",
    "sample": """\
Show training samples of a run as the loader hands them to the model, from its configuration alone: which documents
they are made of, what is trained, padding, and with --ids the id, position and document number of every token. A run
that is resumed is seen in the order that the checkpoint in `save` keeps.

With --json each sample is a line: tokens, targets, mask, positions, doc_ids, where it comes from, text.""",
    "steps": """\
List the samples of some steps of a run: source, documents and the tokens of them, from the configuration alone. The
same for any number of ranks. Steps count from 0, as in the phases of train_data_weights; the log's iteration is one
more. Ranges A..B include both ends.

With --json each sample is a line: role, step, iteration, row, sample, and its origin: source, prefix, the sample's
number in the order of the source, and pieces (file, document, offset, length, size).""",
}


def _of_documents(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="dataset, with or without .bin/.idx")
    add("--documents", default="0:5", metavar="A:B", help="which: `7`, or a range of Python's (default 0:5)")
    add("--vocab-file", metavar="PATH", help="tokenizer.json, vocab.json, .model, ... or a folder")
    add("--merge-file", metavar="PATH", help="merges.txt of a BPE vocabulary")
    add("--tokenizer-type", metavar="TYPE", help="default: HFTokenizer; GPT2BPETokenizer with --merge-file")
    add("--labels", metavar="PREFIX", help="labels, where they are not next to the data (`none`: do not look)")
    add("--npy-eod", type=int, metavar="ID", help="the id that ends a document in .npy files")
    add("--npy-dtype", metavar="TYPE", help="type of the ids in .npy files without header")
    add("--max-tokens", type=int, default=2000, metavar="N", help="show N tokens of each (default 2000; 0: all)")
    _of_output(parser)


def _of_runs(parser: argparse.ArgumentParser, command: str) -> None:
    add = parser.add_argument
    add("conf", nargs="+", metavar="CONF", help="config files of the run, and key=value for what is to be different")
    add("-d", "--conf_dir", metavar="DIR", help="put DIR in front of every config file")
    add("-H", "--hostfile", metavar="PATH", help="the run's, where it decides how many ranks there are")
    add("--role", default="train", metavar="ROLE", help="train (default), valid, test, or valid/NAME of a named set")
    add("--sample", metavar="K|A..B", help="samples by their number in the run")
    add("--step", "--steps", dest="steps", metavar="K|A..B", help="all samples of some steps, which count from 0")
    add("--iteration", "--iterations", dest="iterations", metavar="K|A..B", help="the same as the log counts them")
    if command == "sample":
        add("--samples", type=int, metavar="N", help="N samples spread evenly over the run (with --html: 20)")
        add("--max-tokens", type=int, default=0, metavar="N", help="show N tokens of each document (default: all)")
        _of_output(parser)
        return
    add("--find", metavar="FILE:DOC|FILE:A..B", help="only samples that hold these documents of a file or source")
    add("--rank", action="store_true", help="also which data-parallel rank reads a sample, in which micro-batch")
    add("--json", action="store_true", help="a JSON object per line")


def _of_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ids", action="store_true", help="a line per token")
    add("--json", action="store_true", help="a JSON object per line")
    add("--html", metavar="FILE", help="write a page for a browser (one file, nothing loaded from elsewhere)")
    add("--color", choices=("auto", "always", "never"), default="auto", help="auto: on terminals, without NO_COLOR")


def closed_range(text: str, flag: str) -> range:
    """`K` or `A..B`, both ends included."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first = int(match[1]) if match else 0
    last = int(match[2]) if match and match[2] is not None else first
    if match is None or last < first:
        raise UserError(f"{flag} {text}: give a number, or a range A..B of which both ends are meant, such as 3..5")
    return range(first, last + 1)


def python_range(text: str, count: int, flag: str) -> range:
    """`K` or Python's `A:B` (also `A:`, `:B`, `-3:`) of `count` things."""
    match = re.fullmatch(r"(-?\d+)|(-?\d+)?:(-?\d+)?", text)
    if match is None:
        raise UserError(f"{flag} {text}: give a number, or a range such as 0:5 (without its end, as in Python)")
    if match[1] is None:
        found = range(count)[slice(*(int(one) if one else None for one in match.group(2, 3)))]
    else:
        number = int(match[1])
        found = range(count)[number:][:1] if -count <= number < count else range(0)
    if not found:
        raise UserError(f"{flag} {text}: nothing to show, there are {count}")
    return found
