"""A run folder seen from outside: its small files and the ends of the large ones, whatever state they are in.

Another process writes these files, on another machine perhaps, and may be killed meanwhile: what cannot be read is
noted as damage of this run, and never an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.run_metrics import OF_LOGS, is_log
from megatron.errors import UserError
from megatron.files import json_lines, number, read_json, whole

_TAIL = 64 * 1024  # bytes of metrics.jsonl: some hundred lines
_LONGEST_TAIL = 4 * 1024 * 1024  # where lines are long (norms of every parameter)
_DEPTH = 4  # of run folders below a folder of checkpoints
_NO_RUNS = re.compile(r"global_step\d+|\..*|logs|eval_results|profile|wandb|tensorboard|code|__pycache__")


@dataclass(frozen=True)
class Score:
    """The newest value of an evaluation's metric."""

    value: float
    iteration: int | None


@dataclass(frozen=True)
class RunFolder:
    """What a run folder says.

    Attributes:
        status: `status.json`; empty without one.
        written: when it was last replaced, by the clock of the file system (seconds since 1970).
        lines: the training lines at the end of `metrics.jsonl` that belong to this start of the run, oldest first.
        scores: of evaluations, by name.
        evaluations: iteration -> state of its evaluation by a job of its own (`eval_results/jobs.json`).
        links: the starts of the run's jobs, oldest first, from `chain.json`.
        in_a_row: how many of them, the last ones, failed or came no further, from there too.
        damage: what cannot be read, as `file: why`.
    """

    path: Path
    status: Mapping[str, Any] = field(default_factory=dict)
    written: float | None = None
    lines: tuple[Mapping[str, Any], ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)
    evaluations: Mapping[int, str] = field(default_factory=dict)
    links: tuple[Mapping[str, Any], ...] = ()
    in_a_row: int = 0
    damage: tuple[str, ...] = ()

    @property
    def experiment(self) -> str:
        """The name that the run was started with, else that of its folder."""
        given = self.status.get("experiment")
        return given if isinstance(given, str) and given else layout.run_name(self.path)

    @property
    def job_ids(self) -> list[str]:
        """SLURM's jobs of this run, oldest first, with one that is to follow."""
        named = [link.get("job_id") for link in self.links] + [self.status.get("job_id")]
        named += [self.links[-1].get("next")] if self.links else []
        return list(dict.fromkeys(str(one) for one in named if str(one).replace("_", "").isdigit()))


def read_folder(path: Path, brief_before: float = 0.0) -> RunFolder:
    """Everything about the run in `path`; without its metrics when it is done, or silent since `brief_before`."""
    damage: list[str] = []
    status = _read(path / "status.json", damage)
    written = None
    if status:
        try:
            written = (path / "status.json").stat().st_mtime
        except OSError as error:
            damage.append(f"status.json: {error.strerror}")
    chain = _read(path / "chain.json", damage)
    links = chain.get("links")
    started = number(status.get("started")) or 0.0
    is_over = status.get("exit_code") == 0 or (number(status.get("heartbeat")) or brief_before) < brief_before
    lines, scores = ((), {}) if brief_before and is_over else _read_metrics(path / "metrics.jsonl", started, damage)
    return RunFolder(
        path,
        status,
        written,
        lines,
        scores,
        _evaluations(_read(path / "eval_results/jobs.json", damage).get("jobs")),
        tuple(link for link in links if isinstance(link, dict)) if isinstance(links, list) else (),
        whole(chain.get("in_a_row")) or 0,
        tuple(damage),
    )


def _evaluations(jobs: Any) -> dict[int, str]:
    entries = jobs.items() if isinstance(jobs, dict) else ()
    return {int(step): str(one.get("state")) for step, one in entries if step.isdigit() and isinstance(one, dict)}


def _read(path: Path, damage: list[str]) -> dict[str, Any]:
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (UserError, OSError) as error:
        damage.append(f"{path.name}: {str(error).removeprefix(f'{path} ')}")
        return {}


def read_end(path: Path, size: int) -> tuple[bytes, bool]:
    """The last `size` bytes of a file, and whether that is all of it. Raises `OSError`."""
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - size))
        return file.read(size), length <= size


def _read_metrics(
    path: Path, started: float, damage: list[str]
) -> tuple[tuple[Mapping[str, Any], ...], dict[str, Score]]:
    size = _TAIL
    while True:
        try:
            text, is_all = read_end(path, size)
        except FileNotFoundError:
            return (), {}
        except OSError as error:
            damage.append(f"metrics.jsonl: {error.strerror}")
            return (), {}
        whole_lines = text[: text.rfind(b"\n") + 1]  # the last line may be half written
        if not is_all:
            whole_lines = whole_lines[whole_lines.find(b"\n") + 1 :]
        if is_all or size >= _LONGEST_TAIL or any(f'"{name}"'.encode() in whole_lines for name in OF_LOGS):
            break
        size *= 8
    read = list(json_lines(whole_lines.split(b"\n")))
    entries = [one for one in read if one is not None]
    if bad := len(read) - len(entries):
        damage.append(f"metrics.jsonl: {bad} of its last lines are no JSON object")
    training = [one for one in entries if is_log(one)]
    scores: dict[str, Score] = {}
    for one in entries:
        step = whole(one.get("step"))
        for name, entry in () if is_log(one) else one.items():
            known = scores.get(name)
            # An evaluation by a job of its own comes later than others of its step.
            newer = known is None or (step or 0) >= (known.iteration or 0)
            if "/" in name and newer and (value := number(entry)) is not None:
                scores[name] = Score(value, step)
    return tuple(one for one in training if (number(one.get("time")) or 0.0) >= started), scores


def find_folders(roots: Iterable[Path]) -> list[Path]:
    """The run folders among `roots` and below them: those with a `status.json`. What cannot be listed is left out."""
    found: dict[str, Path] = {}
    todo = [(root, 0) for root in roots]
    while todo:
        folder, depth = todo.pop()
        below = []
        is_run = False
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    is_run = is_run or entry.name == "status.json"
                    if not _NO_RUNS.fullmatch(entry.name) and entry.is_dir():
                        below.append((folder / entry.name, depth + 1))
        except OSError:
            continue
        if is_run:
            found.setdefault(os.path.realpath(folder), folder)
        elif depth < _DEPTH:
            todo += below
    return sorted(found.values())
