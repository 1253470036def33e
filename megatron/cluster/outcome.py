"""How a job ended: by the run's own `status.json`, where a launcher's exit code is too coarse."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron.checkpoint.lock import is_held
from megatron.cluster.local import JobEnd, exit_code
from megatron.cluster.status import StatusFile, slurm_job
from megatron.errors import LostRankError, StopRequested
from megatron.log import get_logger

logger = get_logger(__name__)


def outcome(code: int, run_folder: Path | None, since: float, end: JobEnd | None = None) -> int:
    """The exit code of a job that another launcher ended with `code`: the run's own, if it wrote one.

    mpirun, srun and torchrun turn most failures into 1; `status.json` keeps the code of the table. `end` is what is
    written there when rank 0 was killed before it could write its own; None: ranks may still run.
    """
    status = _own(run_folder, since) if run_folder else None
    if code == 0 or status is None:
        return code
    own = status.get("exit_code")
    if isinstance(own, int) and own != 0:
        logger.error(
            f"{run_folder}/status.json: {status.get('state')} at step {status.get('step')}: {status.get('reason')}"
        )
        return exit_code(own)
    logger.error(f"{run_folder}/status.json: last heartbeat at step {status.get('step')} ({status.get('state')})")
    if end is not None and run_folder is not None:
        record_end(run_folder, since, end)
    return code


def record_end(run_folder: Path, since: float, end: JobEnd) -> None:
    """Write into `status.json` what only the launcher knows: which rank failed, and the code of the whole job.

    The run's rank 0 writes that file; when another rank is killed it sees only a lost connection, when it is killed
    itself it writes nothing, and when it is killed while starting the file is still that of the start before.
    """
    file = StatusFile(run_folder)
    own = _own(run_folder, since)
    status = own or file.read()
    if status is None or end.code == 0 or (own is None and is_held(run_folder)):
        return
    if own is not None and own.get("exit_code") == end.code and not end.known_best:
        if end.code == LostRankError.exit_code:
            logger.error(str(own.get("reason") or "a rank was lost"))  # last, since it names the rank
        return  # the run has said why itself
    state = "ended" if end.code == StopRequested.exit_code else "failed"
    # Of a job that was killed while starting, the file knows nothing yet.
    fresh = {"started": since, "start_step": None, "first_step": None, **slurm_job()} if own is None else {}
    file.update(status, **fresh, state=state, exit_code=end.code, reason=end.reason)


def _own(run_folder: Path, since: float) -> dict[str, Any] | None:
    """What the ranks of this job, which have ended, wrote since it began.

    Of two starts within a moment outside of SLURM, only the lock says whose the status is: one of them holds it.
    """
    own = StatusFile(run_folder).read_own(since)
    return None if slurm_job()["job_id"] is None and is_held(run_folder, here=True) else own


def await_end(code: int, run_folder: Path, since: float, patience: float = 600.0) -> int:
    """Wait until a run that was asked to stop, on hosts we are no longer connected to, has written how it ended.

    Returns its exit code, or `code` when it writes none within `patience` seconds or never started.
    """
    deadline = time.monotonic() + patience
    file = StatusFile(run_folder)
    if file.read_own(since) is None:
        return code
    logger.info(f"waiting for the ranks to save ({run_folder}/status.json)")
    while time.monotonic() < deadline:
        status = file.read_own(since)
        if status is not None and status.get("state") in ("ended", "failed"):
            logger.info(f"{run_folder}: {status['state']} at step {status.get('step')}: {status.get('reason')}")
            found = status.get("exit_code")
            return exit_code(found if isinstance(found, int) else 0)
        time.sleep(0.5)
    logger.error(f"{run_folder}: the ranks wrote nothing for {patience:g} s")
    return code
