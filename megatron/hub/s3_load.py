"""What a start reads from a bucket first: one of its own checkpoints (`s3_path`), or the one that `s3_load` names.

`load` is the folder where that one arrives; once it has, the start reads `load` as any other folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from megatron.checkpoint import layout
from megatron.checkpoint.find import NONE_DAMAGED, Damaged, Listing, list_checkpoints
from megatron.checkpoint.start import Start, check_folder, decide_start, loads_own
from megatron.data.tokens.cache_lock import hold_lock
from megatron.errors import UserError
from megatron.hub.s3 import S3Error, S3Folder, drop_downloads
from megatron.log import get_logger
from megatron.neox_arguments.schema_train import CheckpointConfig

logger = get_logger(__name__)

_LOCK = ".fetch.lock"


@dataclass(frozen=True)
class Missing:
    """A checkpoint of a bucket that a start has to fetch into the folder `root`.

    Attributes:
        named: the step was asked for by its number; else it is the latest, and becomes that in `root`.
        resumes: it is where this run has come to, in its own folder.
    """

    stored: S3Folder
    step: int
    root: Path
    named: bool
    resumes: bool = False

    @property
    def address(self) -> str:
        """Of the checkpoint."""
        return f"{self.stored.address}/{layout.step_folder(self.step)}"

    def has_come(self, damaged: Damaged) -> bool:
        """Whether it is there now."""
        mine = list_checkpoints(self.root, damaged=damaged).checkpoints.get(self.step)
        return mine is not None and self.stored.has_same(mine.path)

    def download(self) -> Path:
        """Fetch it, complete or not at all. Returns its folder. Raises `S3Error` and `OSError`."""
        return self.stored.download(self.step, self.root, latest=not self.named)


def find_own(options: CheckpointConfig, damaged: Damaged = NONE_DAMAGED) -> Missing | None:
    """The checkpoint of the run itself, at `s3_path`, that it has to fetch before it decides where to start.

    That is the latest one when `save` has no complete checkpoint up to that step, as on a new machine, or the one that
    `iteration` goes back to and `save` lacks; those in `damaged` are not complete. Raises `UserError` when the bucket
    cannot be read, unless `save` holds something to resume from, and when nobody has the one of `iteration`.
    """
    if options.s3_path is None:
        return None
    mine = list_checkpoints(options.save or "", damaged=damaged)
    while mine.latest is not None and (problem := mine.checkpoints[mine.latest].state_problem):
        damaged = {**damaged, mine.checkpoints[mine.latest].path: problem}
        mine = list_checkpoints(mine.root, damaged=damaged)
    try:
        stored = S3Folder.of(options)
        step, newest = stored.latest(), mine.latest or 0
        if step is None:
            return None
        if (asked := options.iteration) is not None and loads_own(options):
            config = (mine.checkpoints[newest].manifest if newest >= step else stored.manifest(step)).config
            if config.get("iteration") != asked:  # the run was not yet started with it
                return _named(stored, asked, mine)
    except S3Error as error:
        if mine.latest is None:
            raise UserError(f"s3_path: {error}. Whether the run has a checkpoint there cannot be known") from error
        logger.warning(f"s3_path: {error}")
        return None
    if step in mine.steps or step <= newest:
        return None
    return Missing(stored, step, mine.root, named=False, resumes=True)


def _named(stored: S3Folder, step: int, mine: Listing) -> Missing | None:
    if step in mine.steps:
        return None
    if step not in (whole := stored.list_steps()):
        raise UserError(
            f"iteration: no complete checkpoint of iteration {step} in {stored.address}, whose complete steps are "
            f"{whole}, nor in {mine.root}: {mine.describe()}"
        )
    return Missing(stored, step, mine.root, named=True)


def fetch_own(options: CheckpointConfig, damaged: Damaged = NONE_DAMAGED) -> Path | None:
    """Download the checkpoint of `find_own` into `save`. For the rank that holds the lock of `save`.

    Returns its folder; None when nothing was to be fetched, or when it would replace a damaged one and does not
    arrive: then an older one may do. Raises `UserError` for any other that does not.
    """
    missing = find_own(options, damaged)
    if missing is None:
        if options.s3_path is not None:
            drop_downloads(Path(options.save or ""))
        return None
    logger.info(f"{missing.root} lacks the checkpoint {missing.address}, with which the run begins: downloading it")
    try:
        return missing.download()
    except S3Error as error:
        if not (missing.root / layout.step_folder(missing.step)).exists():
            raise UserError(f"s3_path: {error}") from error
        logger.warning(f"s3_path: {error}")
        return None


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
        missing = Missing(stored, chosen, root, named=step is not None)
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
            missing.download()
        elif not missing.named:
            write_latest(root, step)  # it may have been there before another one
        done = True
    return root / layout.step_folder(step)


def fetch_first(options: CheckpointConfig, damaged: dict[Path, str]) -> None:
    """Fetch what a training run lacks at its start; what has arrived is not in `damaged` any more.

    Raises as `fetch_own` and `fetch_load` do. For the rank that holds the lock of `save`.
    """
    for fetch in (fetch_own, fetch_load):
        if (arrived := fetch(options, damaged)) is not None:
            damaged.pop(arrived, None)


def find_first(options: CheckpointConfig) -> Missing | None:
    """What a run fetches before it starts; None for nothing. Fetches nothing, raises the run's `UserError`."""
    return find_own(options) or find_load(options)


def coming_start(options: CheckpointConfig) -> Start | None:
    """Where a run will start that fetches its checkpoint first, logged; None when it fetches nothing."""
    if (missing := find_first(options)) is None:
        return None
    place = f"iteration {missing.step} of {missing.stored.address} into {missing.root}"
    message = f"the run downloads {place} first, and {'resumes' if missing.resumes else 'starts'} from it"
    logger.info(message)
    if missing.resumes:
        return Start("resume", None, missing.step, message)
    return Start("finetune", None, 0, message) if options.finetune else Start("load", None, missing.step, message)


@contextmanager
def _told_of_load() -> Iterator[None]:
    try:
        yield
    except S3Error as error:
        raise UserError(f"load: {error}") from error
