"""Running the repository's command-line programs as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(
    *command: object, timeout: float = 90, check: int | None = 0, largest_file: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python <command>` from the repository root; `check` is the exit code expected (None: any).

    `largest_file` (bytes) makes writing fail beyond it, as on a full disk.
    """
    limit = [] if largest_file is None else ["prlimit", f"--fsize={largest_file}"]
    arguments = [*limit, sys.executable, *map(str, command)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
