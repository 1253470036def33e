"""The log of a job, for what no file of its run folder says: its beginning and its end only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.monitor.folder import read_end

_BYTES = 256 * 1024
_LINES = 100  # at the end
_STARTS = re.compile(r"run .+ starts at iteration \d+ of .+, save: (.+)$", re.MULTILINE)
_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+).*?lm_loss:\s*([0-9.E+-]+|nan|inf)")
_ERROR = re.compile(r"^(?:\[rank \d+\] )?(?:Traceback \(most recent call last\)|error: |\w*(?:Error|Exception): )")
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|oom[-_ ]kill|OOM Killed", re.IGNORECASE)


@dataclass(frozen=True)
class JobLog:
    """What a log says.

    Attributes:
        modified: when it was last written to (seconds since 1970).
        save: the run folder, as the run names it at its start.
        iteration, total, loss: of the last training line, None without one.
        error: the last line after it that names an error.
        out_of_memory: the line after it that says so.
        evaluates: whether an evaluation harness was started after it.
    """

    path: Path
    modified: float
    save: str | None = None
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
    saved = _STARTS.findall(tail) or _STARTS.findall(head)
    steps = list(_STEP.finditer(tail))
    # A traceback of the start before does not count: logs of a job that SLURM restarts are continued.
    since = max([match.end() for match in (*steps[-1:], *list(_STARTS.finditer(tail))[-1:])], default=0)
    after = tail[since:].splitlines()[-_LINES:]
    errors = [line.strip() for line in after if _ERROR.match(line)]
    named = [line for line in errors if "Traceback" not in line]
    error = (named or errors)[-1:]
    step = steps[-1] if steps else None
    return JobLog(
        path,
        modified,
        saved[-1].strip() if saved and not saved[-1].startswith("nothing is stored") else None,
        int(step[1]) if step else None,
        int(step[2]) if step else None,
        float(step[3]) if step and re.fullmatch(r"[\d.]+(E[+-]?\d+)?", step[3]) else None,
        error[0] if error else None,
        next((line.strip() for line in after if OUT_OF_MEMORY.search(line)), None),
        any("Running evaluation harness" in line for line in after),
    )
