#!/usr/bin/env python
"""Which config files below a folder work? Tries each as a user would, and prints a table.

    python tools/compat.py configs                       # load, plan and train two steps of each
    python tools/compat.py ~/gpt-neox/configs --no-train --csv compat.csv

Each file is loaded, checked and planned at its own size, as `deepy.py train.py FILE --dry-run` does; then the model is
shrunk (a few layers, width 64, sequences of 32, one rank) and trained for two steps on a CPU. Data, tokenizer,
checkpoints and folders that it names are replaced by a small data set that is made for this; trackers, uploads and
evaluation tasks are switched off. A file that is no whole config (paths only, or an architecture without a batch) is
tried together with files next to it that give what is missing: the column `with` names them.

Exit code: 0 when every file works, 2 when one does not (the table says why), 1 when one fails by a fault of Deepy.
A long sweep that was stopped goes on with `--json FILE --resume`.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import DeepyError, UserError, run_cli
from megatron.files import write_atomically
from megatron.flags import Parser
from megatron.log import ProgressBar
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.problems import UserErrors
from megatron.plan.partners import ConfigFiles

OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI_", "DLTS_HOSTFILE")


@dataclass
class Row:
    """What became of one file. `loads`, `trains`: None for what was not tried; `why`: messages of what stopped it."""

    file: str
    partners: str = ""
    loads: bool | None = None
    trains: bool | None = None
    why: list[str] = field(default_factory=list)
    fault: bool = False
    seconds: float = 0.0

    def works(self) -> bool:
        return bool(self.loads) and self.trains is not False


def main(argv: Sequence[str] | None = None) -> int:
    """Try every file; the table goes to stdout."""
    options = _parse(argv)
    log.configure()
    options.folder = options.folder.resolve()
    files = ConfigFiles(options.folder)
    if not files.paths:
        raise UserError(f"{options.folder}: no YAML file below it sets a key of a config")
    rows = _read_rows(options.json) if options.resume else {}
    todo = [path for path in files.paths if str(path.relative_to(options.folder)) not in rows]
    with tempfile.TemporaryDirectory(prefix="deepy-compat-") as place, ProgressBar("configs", len(todo), "file") as bar:
        data = _make_data(Path(place))
        _import_once(options.train)
        for row in _try_all(todo, files, options, data):
            rows[row.file] = row
            if options.json:
                write_atomically(options.json, json.dumps([asdict(one) for one in rows.values()], indent=1) + "\n")
            bar(1)
    shown = [rows[name] for name in sorted(rows)]
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [one.name for one in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) | {"why": "\n".join(row.why)} for row in shown)
    print(table(shown))
    print(f"\n{summary(shown)}")
    if files.others:
        print(f"{len(files.others)} further YAML files set no key of a config and were left out")
    return 1 if any(row.fault for row in shown) else 0 if all(row.works() for row in shown) else 2


def table(rows: list[Row]) -> str:
    """One line per file."""
    lines = [("file", "loads", "trains", "with", "why not")]
    for row in rows:
        lines.append((row.file, _word(row.loads), _word(row.trains), row.partners, _shown(row.why)))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[4]]).rstrip()
        for line in lines
    )


def summary(rows: list[Row]) -> str:
    """How many files work, and how many do not, by reason."""
    reasons = Counter(reason for row in rows if not row.works() for reason in _reasons(row))
    trained = sum(row.trains is True for row in rows)
    trials = f", {trained} train two steps" if any(row.trains is not None for row in rows) else ""
    lines = [f"{len(rows)} files: {sum(bool(row.loads) for row in rows)} load{trials}"]
    return "\n".join([*lines, *(f"{number:5} {reason}" for reason, number in reasons.most_common())])


def _word(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _shown(why: list[str]) -> str:
    more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
    return why[0].partition("\n")[0] + more if why else ""


def _reasons(row: Row) -> list[str]:
    """Messages without their places: with file and line each would be one of a kind."""
    places = re.compile(r"^\s*\S+\.ya?ml:\d+: | \(line \d+\)")
    return [places.sub("", why.partition("\n")[0])[:160] for why in row.why]


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("folder", type=Path, help="its .yml and .yaml files, at any depth, are tried")
    flags.add_argument("--no-train", dest="train", action="store_false", help="load and plan only (a few seconds)")
    flags.add_argument("--jobs", type=int, default=1, help="files that are tried at once (default 1)")
    flags.add_argument("--timeout", type=float, default=300, help="seconds that one file may take (default 300)")
    flags.add_argument("--json", type=Path, help="write all rows to this file, whole messages included, as they come")
    flags.add_argument("--csv", type=Path, help="write the table to this file")
    flags.add_argument("--resume", action="store_true", help="keep the rows of --json FILE, try only other files")
    flags.add_argument("--logs", type=Path, help="keep what each try prints in this folder")
    return flags


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser().parse_args(argv)
    if not options.folder.is_dir():
        raise UserError(f"{options.folder}: no such folder")
    if options.resume and options.json is None:
        raise UserError("--resume needs --json FILE: it holds what was tried")
    if options.jobs < 1:
        raise UserError("--jobs: at least 1")
    return options


def _read_rows(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    try:
        return {one["file"]: Row(**one) for one in json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not what --json writes ({error}); remove it, or leave --resume out") from None


def _make_data(place: Path) -> str:
    """A small data set of characters; returns its prefix."""
    import numpy as np

    from megatron.data.tokens.builder import IndexedDatasetBuilder

    prefix, random = place / "synthetic", np.random.RandomState(0)
    lengths = random.randint(100, 300, 4000)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(random.randint(97, 123, lengths.sum()), lengths)
        builder.finalize()
    return str(prefix)


def _import_once(train: bool) -> None:
    """Import what a try needs, so that each is a fork and not seconds of imports."""
    import megatron.plan.trial

    if not train:
        return
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)  # no thread may run when a process is forked
    import torch._dynamo
    import torch._inductor.compile_fx

    import megatron.run.train  # noqa: F401


def _try_all(todo: list[Path], files: ConfigFiles, options: argparse.Namespace, data: str) -> Iterator[Row]:
    """The row of each file, in the order in which they end. Each is tried by a process of its own, for `timeout`
    seconds at most."""
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(todo)), {}  # Connection -> (process, row, when it began)
    while waiting or running:
        while waiting and len(running) < options.jobs:
            path = waiting.pop()
            row = Row(str(path.relative_to(options.folder)))
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_try_one, args=(path, row, files, options, data, theirs))
            process.start()
            theirs.close()
            running[ours] = process, row, time.monotonic()
        began = min(start for _, _, start in running.values())
        ended = wait(list(running), timeout=max(0.0, began + options.timeout - time.monotonic()))
        late = [pipe for pipe, (_, _, start) in running.items() if time.monotonic() - start >= options.timeout]
        for pipe in dict.fromkeys([*ended, *late]):
            process, row, start = running.pop(pipe)
            row = _result(pipe, process, row, options.timeout)
            row.seconds = round(time.monotonic() - start, 2)
            yield row


def _result(pipe: Connection, process: BaseProcess, row: Row, timeout: float) -> Row:
    """What the process sent, else how it ended."""
    try:
        if pipe.poll(0):
            return Row(**pipe.recv())
        row.why, row.fault = [f"took more than {timeout:g} s"], True
    except EOFError:
        process.join()
        row.why, row.fault = [f"the process ended with code {process.exitcode}"], True
    finally:
        if process.is_alive():
            process.kill()
        process.join()
    return row


def _try_one(
    path: Path, row: Row, files: ConfigFiles, options: argparse.Namespace, data: str, pipe: Connection
) -> None:
    """In a process of its own: load, plan and train one file; sends the row."""
    from megatron.plan.trial import dry_run, train_two_steps

    with tempfile.TemporaryDirectory(dir=Path(data).parent) as place:
        shown = Path(place, "output") if options.logs is None else options.logs.resolve() / f"{row.file}.log"
        shown.parent.mkdir(parents=True, exist_ok=True)
        with shown.open("w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in [name for name in os.environ if name.startswith(OF_A_JOB)]:
            del os.environ[name]
        try:
            chosen, args = _load(path, row, files, lambda paths: dry_run(paths, data, place, os.environ))
            if options.train:
                row.trains = False
                os.chdir(place)  # what a run writes into its working folder goes with it
                train_two_steps(chosen, args, data)
                row.trains = True
        except Exception as error:
            parts = error.parts if isinstance(error, UserErrors) else [error]
            row.why, row.fault = list(map(str, parts)), not isinstance(error, UserError)
            if not isinstance(error, DeepyError):
                row.why = [f"{type(error).__name__}: {error}"]
                traceback.print_exc()
        pipe.send(asdict(row))
        sys.stdout.flush()


def _load(
    path: Path, row: Row, files: ConfigFiles, dry_run: Callable[[list[str]], NeoXArgs]
) -> tuple[list[str], NeoXArgs]:
    """The files of the first whole config with `path` that loads, and its configuration. Raises the first error, of
    those that name `path` if any does: another file's fault is not its own."""
    row.loads, errors = False, []
    for whole in files.whole(path):
        chosen = [str(one) for one in whole]
        try:
            args = dry_run(chosen)
        except UserError as error:
            errors.append(error)
            continue
        row.partners = " ".join(str(one.relative_to(files.folder)) for one in whole if one != path)
        row.loads = True
        return chosen, args
    raise next((error for error in errors if str(path) in str(error)), errors[0])


if __name__ == "__main__":
    run_cli(main)
