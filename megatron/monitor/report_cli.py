"""`tools/report.py`: flags, and where the page goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.flags import Parser
from megatron.home import HOME
from megatron.log import configure, progress
from megatron.monitor.folder import find_folders
from megatron.monitor.history import read_history
from megatron.monitor.report import build_page
from megatron.tables import size

_DESCRIPTION = """One HTML page about runs: curves of loss, learning rate, norms, throughput and evaluations, runs laid
over each other, with spikes and restarts. It is one file that opens without a network, and can be sent to others.

    python tools/report.py checkpoints/small                      writes checkpoints/small/report.html
    python tools/report.py runs/a runs/b -o compare.html          two runs in one page
    python tools/report.py runs -o all.html                       all runs below a folder
    python tools/report.py runs/a --metrics 'gradient_norms/*'    only these
    python tools/report.py runs/a --iterations 1200 1201          with links to what the model saw in these steps

RUN is the folder that the run has as `save` (or `log_dir`); it may still be running."""


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=_DESCRIPTION)
    flags.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders that runs are below")
    flags.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html in the first RUN")
    flags.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="metrics to show, such as 'runtime/*'; default: all, of those per parameter or task the first 16",
    )
    flags.add_argument(
        "--iterations",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="steps, as the log counts them, whose training samples get a page each, in a folder next to the page "
        "(what tools/datasets/inspect.py shows; the data of the run have to be there)",
    )
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = parser().parse_args(argv)
    configure()
    folders = list(dict.fromkeys(folder for run in given.runs for folder in _folders(run)))
    output = given.output or given.runs[0] / "report.html"
    samples = [_sample_pages(folder, given.iterations, output, number) for number, folder in enumerate(folders)]
    page = build_page([read_history(folder) for folder in folders], given.metrics, samples)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, page)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from error
    print(f"{output}: {len(folders)} run{'s' * (len(folders) != 1)}, {size(len(page))}", flush=True)
    return 0


def _sample_pages(run: Path, iterations: Sequence[int], output: Path, number: int) -> dict[str, str]:
    """A page of the samples of each of these steps of a run: {step: its address as the page at `output` names it}."""
    folder, found = output.with_name(f"{output.stem}-samples"), {}
    for iteration in progress(iterations, what=f"samples of {run}", unit="page") if iterations else ():
        page = folder / f"{number}-{iteration}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HOME / "tools/datasets/inspect.py"), "sample", str(run / "resolved.yml")]
        command += ["--iteration", str(iteration), "--html", str(page)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            problem = done.stderr.strip().removeprefix("error: ")
            raise UserError(f"--iterations: the samples of iteration {iteration} of {run} cannot be shown: {problem}")
        found[str(iteration)] = f"{folder.name}/{page.name}"
    return found


def _folders(run: Path) -> list[Path]:
    """The run folder itself, or those below."""
    if (run / "metrics.jsonl").is_file():
        return [run]
    found = [one for one in find_folders([run]) if (one / "metrics.jsonl").is_file()]
    if not found:
        raise UserError(f"{run}: neither it nor a folder below is that of a run: there is no metrics.jsonl")
    return found
