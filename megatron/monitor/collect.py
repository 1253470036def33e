"""What to look at: run folders that are given or found, and the jobs of a user."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from megatron.cluster.profile import ClusterProfile
from megatron.cluster.slurm import Slurm, SlurmError
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.monitor.folder import RunFolder, find_folders, read_folder
from megatron.monitor.rows import RECENT_SECONDS, Context, Row, is_shown, make_rows
from megatron.monitor.slurm_jobs import Job, read_jobs

logger = get_logger(__name__)

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
    """What was found at one moment; `notes`: what could not be asked; `unknown`: jobs that do not exist."""

    time: float
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    unknown: tuple[str, ...] = ()


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
    found = {kind: _folder(profile, kind, env) for kind in ("checkpoints", "logs")}
    roots = [Path(place) for place in found.values() if place] or [Path(name) for name in HERE]
    return Selection(tuple(ids), tuple(folders), user, everything, tuple(roots), found["logs"])


def _folder(profile: ClusterProfile, kind: str, env: Mapping[str, str]) -> str | None:
    try:
        return profile.folder(kind, env)
    except UserError as error:  # a variable of the site that is not set here; jobs can be shown without it
        logger.warning(str(error))
        return None


def has_slurm(slurm: Slurm) -> bool:
    """Whether SLURM's commands are installed here (behind a prefix they are taken for granted)."""
    path = None if slurm.env is None else slurm.env.get("PATH")
    return bool(slurm.prefix) or shutil.which("squeue", path=path) is not None


def look(selection: Selection, slurm: Slurm, host: str) -> View:
    """Everything about the selected runs and jobs, now."""
    if selection.ids and selection.folders:
        named = look(replace(selection, ids=()), slurm, host)
        jobs = look(replace(selection, folders=()), slurm, host)
        known = {job for row in named.rows for job in row.job_ids}
        others = [row for row in jobs.rows if not known & set(row.job_ids)]
        nowhere = tuple(job for job in jobs.unknown if job not in known)
        return View(jobs.time, [*others, *named.rows], list(dict.fromkeys([*jobs.notes, *named.notes])), nowhere)
    notes: list[str] = []
    now = time.time()
    folders = find_folders(selection.folders or selection.roots)
    if selection.ids:
        rows = _rows_of_jobs(selection, folders, slurm, host, notes)
    else:
        # Of thousands of runs most are over, and their rows are not shown.
        brief = 0.0 if selection.everything or selection.folders else now - RECENT_SECONDS
        runs = [read_folder(path, brief) for path in folders]
        # Of what is named, the jobs may be somebody else's.
        ids = {job for run in runs for job in run.job_ids} if selection.folders else set()
        rows = _rows(selection, runs, ids, slurm, host, notes)
    if selection.folders:
        rows = [row for row in rows if row.run_folder is not None]
    elif not selection.everything and not selection.ids:
        rows = [row for row in rows if is_shown(row, now)]
    # While something cannot be asked, nobody knows what there is.
    unknown = [] if notes else [one for one in selection.ids if not any(_is_asked_for(row, (one,)) for row in rows)]
    return View(now, rows, list(dict.fromkeys(notes)), tuple(unknown))


def _rows_of_jobs(selection: Selection, folders: list[Path], slurm: Slurm, host: str, notes: list[str]) -> list[Row]:
    """The rows of the jobs `selection.ids`, with the jobs of the same runs that follow them."""
    asked = set(selection.ids)
    found = [run.path for path in folders if asked & set((run := read_folder(path, math.inf)).job_ids)]
    runs = [read_folder(path) for path in found]
    ids = asked | {job for run in runs for job in run.job_ids}
    while True:
        rows = [row for row in _rows(selection, runs, ids, slurm, host, notes) if _is_asked_for(row, selection.ids)]
        more = {job.partition("_")[0] for row in rows for job in row.job_ids}
        if more <= ids:
            return rows
        ids |= more  # of a run that only the log of its job names


def _rows(
    selection: Selection, runs: list[RunFolder], ids: set[str], slurm: Slurm, host: str, notes: list[str]
) -> list[Row]:
    jobs: list[Job] = []
    answered = False
    if has_slurm(slurm) and (ids or not selection.folders):
        try:
            days = _ALL_DAYS if selection.everything or ids else _DAYS
            jobs, answered = read_jobs(slurm, selection.user, sorted(ids), days, notes), True
        except SlurmError as error:
            notes.append(str(error))
    return make_rows(runs, jobs, Context(time.time(), host, psutil.pid_exists, answered, selection.logs))


def _is_asked_for(row: Row, ids: Sequence[str]) -> bool:
    names = {*row.job_ids, (row.job_id or "").partition("_")[0]}
    return any(one in names for one in ids)
