"""What to look at: run folders that are given or found, and the jobs of a user."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron.cluster.profile import ClusterProfile
from megatron.cluster.slurm import Slurm, SlurmError
from megatron.errors import UserError
from megatron.monitor.folder import RunFolder, find_folders, read_folder
from megatron.monitor.rows import Context, Row, is_shown, make_rows
from megatron.monitor.slurm_jobs import Job, read_jobs

_DAYS, _ALL_DAYS = 1, 30  # for which ended jobs are asked for
HERE = ("checkpoints", "runs")  # folders of runs, where the profile names none


@dataclass(frozen=True)
class Selection:
    """Which rows are wanted. `folders`: run folders, or folders above them; `user`: None for all."""

    ids: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    user: str | None = None
    everything: bool = False
    roots: tuple[Path, ...] = ()
    logs: str | None = None


@dataclass(frozen=True)
class View:
    """What was found at one moment; `notes`: what could not be asked."""

    time: float
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


def select(
    what: Sequence[str], user: str | None, everything: bool, profile: ClusterProfile, env: Mapping[str, str]
) -> Selection:
    """A selection of the arguments `what`: numbers of jobs (`71`, `71_3`) and folders. Raises `UserError`."""
    ids, folders = [], []
    for one in what:
        if one.replace("_", "").isdigit() and not os.path.isdir(one):
            ids.append(one)
        elif os.path.isdir(one):
            folders.append(Path(one))
        else:
            raise UserError(f"{one}: neither the number of a job nor a folder of a run")
    found = [profile.folder(kind, env) for kind in ("checkpoints", "logs")]
    roots = [Path(place) for place in found if place] or [Path(name) for name in HERE]
    return Selection(tuple(ids), tuple(folders), user, everything, tuple(roots), found[1])


def has_slurm(slurm: Slurm) -> bool:
    """Whether SLURM's commands are installed here (behind a prefix they are taken for granted)."""
    path = None if slurm.env is None else slurm.env.get("PATH")
    return bool(slurm.prefix) or shutil.which("squeue", path=path) is not None


def look(selection: Selection, slurm: Slurm, host: str) -> View:
    """Everything about the selected runs and jobs, now."""
    notes: list[str] = []
    now = time.time()
    runs = [read_folder(path) for path in find_folders(selection.folders or selection.roots)]
    # Of what is named, the jobs may be somebody else's, and others of the same run may follow.
    ids = {job for run in runs for job in run.job_ids if selection.folders or set(run.job_ids) & set(selection.ids)}
    rows = _rows(selection, runs, ids | set(selection.ids), slurm, host, notes)
    if selection.ids:
        rows = [row for row in rows if _is_asked_for(row, selection.ids)]
        more = {job for row in rows for job in row.job_ids} - ids
        if more - set(selection.ids):  # of a run that only the log of its job names
            rows = [
                row
                for row in _rows(selection, runs, ids | more | set(selection.ids), slurm, host, notes)
                if _is_asked_for(row, selection.ids)
            ]
    elif selection.folders:
        rows = [row for row in rows if row.run_folder is not None]
    elif not selection.everything:
        rows = [row for row in rows if is_shown(row, now)]
    return View(now, rows, list(dict.fromkeys(notes)))


def _rows(
    selection: Selection, runs: list[RunFolder], ids: set[str], slurm: Slurm, host: str, notes: list[str]
) -> list[Row]:
    jobs: list[Job] = []
    answered = False
    if has_slurm(slurm) and (ids or not selection.folders):
        try:
            days = _ALL_DAYS if selection.everything or ids else _DAYS
            jobs, answered = read_jobs(slurm, selection.user, sorted(ids), days), True
        except SlurmError as error:
            notes.append(str(error))
    return make_rows(runs, jobs, Context(time.time(), host, psutil.pid_exists, answered, selection.logs))


def _is_asked_for(row: Row, ids: Sequence[str]) -> bool:
    names = {*row.job_ids, (row.job_id or "").partition("_")[0]}
    return any(one in names for one in ids)
