"""Going back to an earlier checkpoint of the same run, past the samples that spoilt it: the record of it in `save`.

The record is of its own, because the checkpoint that the run goes back to does not know of it: a start from there must
leave out the same steps. Later checkpoints know of it (the state of `callbacks/loss_spikes`): a machine that has them
alone leaves out the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint, list_checkpoints
from megatron.errors import UserError
from megatron.files import from_json, read_json, write_atomically

FILE = "rewinds.json"
_ADVICE = "Delete it: those rewinds count that the checkpoint knows"


@dataclass(frozen=True)
class Rewind:
    """One of them.

    Attributes:
        to: step of the checkpoint that the run went back to.
        first, last: the steps with a high loss.
        skip: the first step whose samples are consumed without an update; `last` is the last one.
    """

    to: int
    first: int
    last: int
    skip: int


class Rewinding(Exception):
    """Leaves the loop for the last of these, the record of the run; raised on all ranks in the same step."""

    def __init__(self, rewinds: Sequence[Rewind]) -> None:
        super().__init__(f"back to iteration {rewinds[-1].to}")
        self.rewinds = list(rewinds)


def read_rewinds(root: Path) -> list[Rewind]:
    """Those of the run in `root`, oldest first. Raises `UserError` for a file that is not such a record."""
    path = root / FILE
    try:
        content = read_json(path, _ADVICE)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return from_rows(content["rewinds"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not a record of rewinds: {error}. {_ADVICE}") from error


def write_rewinds(root: Path, rewinds: Sequence[Rewind]) -> None:
    """Replace the record."""
    write_atomically(root / FILE, json.dumps({"rewinds": to_rows(rewinds)}, indent=1) + "\n")


def to_rows(rewinds: Sequence[Rewind]) -> list[dict[str, int]]:
    """Plain values of them."""
    return [dataclasses.asdict(one) for one in rewinds]


def from_rows(rows: Sequence[Mapping[str, int]]) -> list[Rewind]:
    """The inverse of `to_rows`."""
    return [from_json(Rewind, one) for one in rows]


def choose_rewind(root: Path, first: int, last: int, before: int) -> Rewind | None:
    """Where a run goes back to whose loss is high from step `first` to `last`; None without a checkpoint for it.

    The weights of a checkpoint are known to be good once the loss of the next step was: so that of `first - 2` at the
    latest. If there is one from before the `before` steps that are left out with the high ones, it is the newest of
    those.
    """
    found = list_checkpoints(root)
    line = [(step, one) for step, one in found.checkpoints.items() if step not in found.abandoned]
    good = [step for step, one in line if step <= first - 2 and _is_whole(one)]
    if not good:
        return None
    to = max((step for step in good if step < first - before), default=good[-1])
    return Rewind(to, first, last, max(to + 1, first - before))


def _is_whole(checkpoint: Checkpoint) -> bool:
    """Whether a run can go on from it exactly (an earlier start may have had `no_save_optim` or `no_save_rng`)."""
    files = checkpoint.manifest.files
    return checkpoint.manifest.optimizer and layout.rng_file(0) in files and checkpoint.state_problem is None
