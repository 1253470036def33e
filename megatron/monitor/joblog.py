"""The log of a job, for what no file of its run folder says: its beginning and its end only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.files import number
from megatron.monitor.folder import read_end

_BYTES = 256 * 1024
_LINES = 100  # at the end
_STARTS = re.compile(r"run .+ starts at iteration (\d+) of .+, save: (.+)$", re.MULTILINE)
_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+).*?lm_loss:\s*([0-9.E+-]+|NAN|-?INF)\b")
_ERROR = re.compile(r"^(?:\[rank \d+\] )?(?:Traceback \(most recent call last\)|error: |\w*(?:Error|Exception): )")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|oom[-_ ]kill|OOM Killed", re.IGNORECASE)


@dataclass(frozen=True)
class JobLog:
    """What a log says.

    Attributes:
        modified: when it was last written to (seconds since 1970).
        save: the run folder, as the run names it at its start.
        start: the iteration where it starts.
        iteration, total, loss: of the last training line of this start; None without one (loss: or not finite).
        error: the last line after it that names an error.
        out_of_memory: the line after it that says so.
        evaluates: whether an evaluation harness was started after it.
    """

    path: Path
    modified: float
    save: str | None = None
    start: int | None = None
    iteration: int | None = None
    total: int | None = None
    loss: float | None = None
    error: str | None = None
    out_of_memory: str | None = None
    evaluates: bool = False


def read_log(path: Path) -> JobLog | None:
    """The facts of a log; None when there is no such file."""
    try:
        modified = path.stat().st_mtime
        with path.open("rb") as file:
            head = file.read(_BYTES).decode(errors="replace")
        tail = read_end(path, _BYTES)[0].decode(errors="replace")
    except OSError:
        return None
    starts = list(_STARTS.finditer(tail))
    said = starts[-1:] or list(_STARTS.finditer(head))[-1:]
    save = said[0][2].strip() if said else "nothing is stored"
    steps = list(_STEP.finditer(tail, starts[-1].end() if starts else 0))
    # A traceback of the start before does not count: logs of a job that SLURM restarts are continued.
    since = max([match.end() for match in (*steps[-1:], *starts[-1:])], default=0)
    after = tail[since:].splitlines()[-_LINES:]
    errors = [line.strip() for line in after if _ERROR.match(line)]
    named = [line for line in errors if "Traceback" not in line]
    error = (named or errors)[-1:]
    step = steps[-1] if steps else None
    return JobLog(
        path,
        modified,
        None if save == "nothing is stored" else save,
        int(said[0][1]) if said else None,
        int(step[1]) if step else None,
        int(step[2]) if step else None,
        number(_float(step[3])) if step else None,
        error[0] if error else None,
        next((line.strip() for line in after if OUT_OF_MEMORY.search(line)), None),
        any("Running evaluation harness" in line for line in after),
    )


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
