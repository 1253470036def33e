"""What a run says about its own end, where a launcher's exit code says too little."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megatron.cluster.local import JobEnd, exit_code
from megatron.errors import LostRankError
from megatron.log import get_logger

logger = get_logger(__name__)


def read_status(run_folder: Path, since: float) -> dict[str, Any] | None:
    """`status.json` of the run folder, if it was written after `since` (seconds since the epoch) and is whole."""
    path = run_folder / "status.json"
    try:
        status = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_mtime >= since else None
    except (OSError, json.JSONDecodeError):
        return None
    return status if isinstance(status, dict) else None


def outcome(code: int, run_folder: Path | None, since: float) -> int:
    """The exit code of a job that another launcher ended with `code`: by the run's own account if there is one.

    mpirun, srun and torchrun turn most failures into 1; `status.json` keeps the code that says what to do next.
    """
    status = read_status(run_folder, since) if run_folder else None
    if code == 0 or status is None:
        return code
    told = status.get("exit_code")
    if isinstance(told, int) and told != 0:
        logger.error(
            f"{run_folder}/status.json: {status.get('state')} at step {status.get('step')}: {status.get('reason')}"
        )
        return exit_code(told)
    logger.error(f"{run_folder}/status.json: last sign of life at step {status.get('step')} ({status.get('state')})")
    return code


def record_end(run_folder: Path, since: float, end: JobEnd) -> None:
    """Put what only the launcher knows into `status.json`: which rank failed, and the code of the whole job.

    Rank 0 writes that file; when another rank is killed it knows only of a lost connection, when it is killed itself
    it writes nothing.
    """
    status = read_status(run_folder, since)
    if status is None or end.reason is None:
        return
    told = status.get("exit_code")
    if told == end.code and told != LostRankError.exit_code:  # which rank was lost, rank 0 cannot know
        return
    status |= {"state": "failed", "exit_code": end.code, "reason": end.reason}
    temporary = run_folder / f".status.json.{os.getpid()}"
    temporary.write_text(json.dumps(status, indent=2) + "\n", encoding="utf-8")
    temporary.replace(run_folder / "status.json")


def await_end(code: int, run_folder: Path, since: float, patience: float = 600.0) -> int:
    """Wait until a run that was asked to stop, on hosts we are no longer connected to, has said how it ended.

    Returns its exit code, or `code` when it says nothing within `patience` seconds or never started to.
    """
    deadline = time.monotonic() + patience
    if read_status(run_folder, since) is None:
        return code
    logger.info(f"waiting for the ranks to save ({run_folder}/status.json)")
    while time.monotonic() < deadline:
        status = read_status(run_folder, since)
        if status is not None and status.get("state") in ("ended", "failed"):
            logger.info(f"{run_folder}: {status['state']} at step {status.get('step')}: {status.get('reason')}")
            return exit_code(int(status.get("exit_code") or 0))
        time.sleep(0.5)
    logger.error(f"{run_folder}: no word from the ranks for {patience:g} s")
    return code
