"""Deletes old and temporary checkpoints: never the latest, the newest good one or one kept on purpose, never before the
new one is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.find import list_checkpoints
from megatron.log import get_logger

logger = get_logger(__name__)


def to_delete(
    complete: Collection[int],
    latest: int | None,
    keep_last_n: int | None,
    extra: Collection[int],
    good: int | None = None,
    temporary: Collection[int] = (),
    abandoned: Collection[int] = (),
) -> list[int]:
    """Steps to delete, ascending.

    Args:
        complete: steps of the complete checkpoints; others are neither counted nor deleted.
        latest: the step that a start would resume from; never deleted. Later ones are of a line that the run went back
            from: they do not count, and stay until they are replaced (temporary ones go).
        keep_last_n: `keep_last_n_checkpoints`; None or <= 0 keeps all. Temporary ones do not count.
        extra: `extra_save_iters`; these stay, whatever their number.
        good: the newest that is known to be good; stays until a newer one has taken its place.
        temporary: those that go once a newer one is complete.
        abandoned: those of a line that the run went back from do not count either; they go with older ones.
    """
    if latest is None:
        latest = max(complete, default=0)
    lasting = [step for step in complete if step not in temporary and step <= latest]
    line = sorted(step for step in lasting if step not in abandoned)
    oldest = line[-keep_last_n:][:1] if keep_last_n is not None and keep_last_n > 0 else []
    gone = [step for step in lasting if step < min(oldest, default=0)]
    kept = {*extra, latest, good}
    return sorted(step for step in {*gone, *temporary} if step not in kept)


def apply_retention(
    root: str | Path,
    keep_last_n: int | None,
    extra: Collection[int] | None = None,
    good: int | None = None,
    temporary: Collection[int] = (),
) -> list[int]:
    """Delete what `to_delete` says in `root`; returns the deleted steps. Call on one rank, after a completed save.

    A deletion that fails is reported and tried again after the next save: it is no reason to stop a run.
    """
    if not temporary and (keep_last_n is None or keep_last_n <= 0):
        return []
    listing = list_checkpoints(root)
    gone = to_delete(listing.steps, listing.latest, keep_last_n, extra or (), good, temporary, listing.abandoned)
    deleted = []
    for step in gone:
        trash = listing.root / layout.trash_folder(step)
        path = listing.checkpoints[step].path
        try:
            os.rename(path, trash)  # so that a deletion cut short leaves no half checkpoint by its name
            deleted.append(step)
            shutil.rmtree(trash)
        except OSError as error:
            logger.warning(f"{path} could not be deleted: {error}")
    return deleted
