"""Suites of evaluation tasks, each a YAML file: ours are in `eval_suites`. Imports neither torch nor the harness.

include: [core]                      # other suites, all of whose tasks are in this one
tasks:
  - task: hellaswag                  # a task or group of the harness's, or of a folder in eval_tasks_path
    num_fewshot: 10                  # examples before each question
    alias: hellaswag_10shot          # its name in results; default: the task's
    metric: acc_norm                 # what the average is of; default: acc. With a filter: "metric,filter"
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError, nearest

FOLDER = Path(__file__).with_name("eval_suites")


@dataclass(frozen=True)
class Entry:
    """A task of a suite.

    Attributes:
        name: in results.
        metric: `metric,filter`, as the harness names results.
    """

    task: str
    num_fewshot: int
    alias: str = ""
    metric: str = "acc"

    @property
    def name(self) -> str:
        return self.alias or self.task

    @property
    def result(self) -> str:
        """The harness's name of the metric."""
        return self.metric if "," in self.metric else f"{self.metric},none"

    def rename(self, name: str) -> str:
        """The name in results of a task or group that belongs to this one: mmlu_anatomy is mmlu_5shot_anatomy."""
        if name == self.task or not self.alias:
            return self.name if name == self.task else name
        return f"{self.alias}_{name.removeprefix(f'{self.task}_')}"


@dataclass(frozen=True)
class Suite:
    """A name and what it stands for."""

    name: str
    entries: tuple[Entry, ...]


def names() -> list[str]:
    """Of our suites."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def read_suites(asked: tuple[str, ...] | None) -> list[Suite]:
    """The suites of the key `eval_suite`: names of ours, or YAML files.

    Raises:
        UserError: there is no such suite, its file is wrong, or two say different things of one name.
    """
    suites = [_read(name, ()) for name in dict.fromkeys(asked or ())]
    known: dict[str, Entry] = {}
    for suite in suites:
        for entry in suite.entries:
            if known.setdefault(entry.name, entry) != entry:
                raise UserError(
                    f"eval_suite: {suite.name} and another one have different tasks named {entry.name}: "
                    f"{entry}, {known[entry.name]}; give one an alias"
                )
    return suites


def _read(name: str, within: tuple[Path, ...]) -> Suite:
    path = _find(name, within[-1].parent if within else None)
    if path in within:
        raise UserError(f"eval_suite: {path} includes itself, through {', '.join(map(str, within[1:])) or 'no other'}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"eval_suite: {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not (content.keys() <= {"include", "tasks"} and content):
        raise UserError(f"eval_suite: {path} needs `tasks`, a list, or `include`, and takes nothing else")
    found: dict[str, Entry] = {}
    for part in content.get("include") or ():
        found |= {entry.name: entry for entry in _read(str(part), (*within, path)).entries}
    for number, item in enumerate(content.get("tasks") or (), start=1):
        entry = _entry(item, f"eval_suite: {path}, task {number}")
        if found.setdefault(entry.name, entry) != entry:
            raise UserError(f"eval_suite: {path} has two tasks named {entry.name}; give one an alias")
    if not found:
        raise UserError(f"eval_suite: {path} has no tasks")
    return Suite(path.stem, tuple(found.values()))


def _find(name: str, beside: Path | None) -> Path:
    """The file of a suite: ours, or a path (in a file also beside that)."""
    ours = FOLDER / f"{name}.yml"
    places = [ours, Path(name), *([beside / name] if beside else [])]
    for place in places:
        if place.suffix in (".yml", ".yaml") and place.is_file():
            return place
    raise UserError(
        f"eval_suite: there is no suite {name!r}.{nearest(name, names())} There are {', '.join(names())}; "
        "a YAML file with tasks can be given too"
    )


def _entry(item: Any, where: str) -> Entry:
    known = {field.name: field.default for field in fields(Entry)}
    if not isinstance(item, dict) or not item.keys() <= known.keys():
        raise UserError(f"{where}: {item!r} is not a mapping with {', '.join(known)}")
    for key, default in known.items():
        kind = int if key == "num_fewshot" else str
        if key not in item and default is MISSING:
            raise UserError(f"{where}: {key} is missing in {item!r}")
        value = item.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise UserError(f"{where}: {key} is {value!r}; it takes {'a number, 0 or more' if kind is int else 'text'}")
    return Entry(**item)
