"""Suites (suites.py) as groups of the harness: their tasks under the names of the suite, and their average."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.metrics import unweighted_mean_stderr

from megatron.inference.suites import Entry, Suite

MACRO = "macro,none"

Loaded = Mapping[str, Mapping[str, Any]]
"""Tasks and groups by name, as the harness's `TaskManager.load` returns them."""


class SuiteGroup(Group):
    """A suite: the mean of its tasks' scores, in which a group is one task, however many it has.

    (A group of the harness averages the tasks at the bottom: MMLU would be 57 of them.)
    """

    entries: tuple[Entry, ...] = ()
    problem = ""  # why there is no average, after `aggregate`

    @classmethod
    def of(cls, suite: Suite, loaded: Loaded) -> SuiteGroup:
        """With the tasks and groups of the suite's entries, as far as they could be loaded."""
        found = cls(suite.name)
        found.entries = suite.entries
        for entry in suite.entries:
            member = loaded["groups"].get(entry.name, loaded["tasks"].get(entry.name))
            if member is not None:
                found.add(member)
        return found

    @property
    def has_aggregation(self) -> bool:
        return True

    def aggregate(self, task_metrics: Mapping[str, Mapping[str, Any]]) -> Any:
        """The average of the results of all entries; none, and a `problem`, where one lacks its metric."""
        named = {"alias": self.name, "name": self.name}
        scores, errors = [], []
        for entry in self.entries:
            results = task_metrics.get(entry.name, {})
            if entry.result not in results:
                has = ", ".join(name for name in results if "," in name and "_stderr," not in name) or "nothing"
                self.problem = f"{entry.name} has no {entry.result} (it has {has})"
                return named
            scores.append(results[entry.result])
            errors.append(results.get(entry.result.replace(",", "_stderr,", 1)))
        known = all(isinstance(error, float) for error in errors)
        error = unweighted_mean_stderr(errors) if known else "N/A"
        return {**named, MACRO: sum(scores) / len(scores), MACRO.replace(",", "_stderr,"): error}


def load_entry(entry: Entry, load: Callable[[str], Loaded]) -> dict[str, dict[str, Any]]:
    """The task or group of an entry, newly loaded, all of it under the names of the suite."""
    found = load(entry.task)
    tasks, groups = list(found["tasks"].values()), list(found["groups"].values())
    for task in tasks:
        task.set_config("task", entry.rename(task.task_name))
    for group in groups:
        group.name = entry.rename(group.name)
    for group in groups:  # knows what it holds by name
        children = list(group)
        for name in group.child_names:
            group.pop(name)
        for child in children:
            group.add(child)
    return {"tasks": {task.task_name: task for task in tasks}, "groups": {group.name: group for group in groups}}
