"""What a start reads from a bucket first: the newest of its own checkpoints (s3.py), or the one that `s3_load` names.

`load` is the folder where that one arrives; once it has, the start reads `load` as any other folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from megatron.checkpoint import layout
from megatron.checkpoint.find import NONE_DAMAGED, Damaged, list_checkpoints
from megatron.checkpoint.start import check_folder, decide_start
from megatron.data.tokens.cache_lock import hold_lock
from megatron.errors import UserError
from megatron.hub.s3 import S3Error, S3Folder, fetch_newest, find_stored
from megatron.log import get_logger
from megatron.neox_arguments.schema_train import CheckpointConfig

logger = get_logger(__name__)

_LOCK = ".fetch.lock"


@dataclass(frozen=True)
class Missing:
    """A checkpoint of a bucket that the folder `root` lacks."""

    stored: S3Folder
    step: int
    root: Path

    def has_come(self, damaged: Damaged) -> bool:
        """Whether it is there now."""
        mine = list_checkpoints(self.root, damaged=damaged).checkpoints.get(self.step)
        return mine is not None and self.stored.has_same(mine.path)


@dataclass(frozen=True)
class Coming:
    """What a start fetches: the start's kind and step as in `Start`, and what happens in words."""

    kind: str
    step: int
    message: str


def find_load(options: CheckpointConfig, damaged: Damaged = NONE_DAMAGED) -> Missing | None:
    """The checkpoint of `s3_load` that a start has to fetch into `load`.

    None when the start does not read `load`, or an equal one is there (those in `damaged` are not). Raises `UserError`
    when the bucket does not have it, or cannot be read while `load` lacks it or the newest one is asked for.
    """
    if options.s3_load is None or options.load is None:
        return None
    own = replace(options, load=None, iteration=None)  # without `load`: does the run start from anything else?
    if decide_start(own, to_write=False, damaged=damaged).kind != "fresh":
        return None
    root, place, step = Path(options.load), options.s3_load.rstrip("/"), options.iteration
    if (pinned := layout.step_of(PurePosixPath(place).name)) is not None:
        if step not in (None, pinned):
            raise UserError(f"iteration: {step} is asked for, but load is {place}")
        root, place, step = root.parent, place.rpartition("/")[0], pinned
    mine = list_checkpoints(root, damaged=damaged)
    try:
        stored = S3Folder(place, options.s3_chunk_size)
        chosen = stored.latest() if step is None else step
        if chosen is None or chosen not in (whole := stored.list_steps()):
            wanted = "no checkpoint" if chosen is None else f"no complete checkpoint of iteration {chosen}"
            raise UserError(f"load: {wanted} in {place}; complete steps there: {'none' if chosen is None else whole}")
        missing = Missing(stored, chosen, root)
        if missing.has_come(damaged) and (step is not None or mine.latest == chosen):
            return None
    except S3Error as error:
        if step is None or step not in mine.steps:
            raise UserError(f"load: {error}") from error
        logger.warning(f"load: {error}; the copy of iteration {step} in {root} is taken")
        return None
    check_folder("load", root)
    return missing


def fetch_load(options: CheckpointConfig, damaged: Damaged = NONE_DAMAGED) -> Path | None:
    """Fetch what `find_load` finds, complete or not at all, whoever else does. Returns the checkpoint's folder.

    Raises `UserError`, and `OSError` when the disk is full.
    """
    from megatron.checkpoint.folder import write_latest  # needs torch, which the checks before a launch do not

    if (missing := find_load(options, damaged)) is None:
        return None
    root, step, stored, done = missing.root, missing.step, missing.stored, False
    root.mkdir(parents=True, exist_ok=True)
    with _told_of_load(), hold_lock(root / _LOCK, lambda: done, f"to fetch {stored.address}"):
        if not missing.has_come(damaged):
            logger.info(f"downloading iteration {step} of {stored.address} into {root}")
            stored.download(step, root)
        write_latest(root, step)  # it may have been there before another one
        done = True
    return root / layout.step_folder(step)


def fetch_first(options: CheckpointConfig, damaged: dict[Path, str]) -> None:
    """Fetch what a training run lacks at its start; what has arrived is not in `damaged` any more.

    Raises as `fetch_newest` and `fetch_load` do. For the rank that holds the lock of `save`.
    """
    for fetch in (fetch_newest, fetch_load):
        if (arrived := fetch(options, damaged)) is not None:
            damaged.pop(arrived, None)


def announce(options: CheckpointConfig) -> Coming | None:
    """What a run fetches before it starts, logged; None for nothing. Fetches nothing, raises the run's `UserError`."""
    if (newest := find_stored(options)) is not None:
        place, step = f"iteration {newest[1]} of {newest[0].address}", newest[1]
        found = Coming("resume", step, f"the run downloads {place} into {options.save} first, and resumes from it")
    elif (missing := find_load(options)) is not None:
        place, step = f"iteration {missing.step} of {missing.stored.address}", missing.step
        message = f"the run downloads {place} into {missing.root} first, and starts from it"
        found = Coming("finetune", 0, message) if options.finetune else Coming("load", step, message)
    else:
        return None
    logger.info(found.message)
    return found


@contextmanager
def _told_of_load() -> Iterator[None]:
    try:
        yield
    except S3Error as error:
        raise UserError(f"load: {error}") from error
