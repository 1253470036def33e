"""The tasks of lm-evaluation-harness that a config names: found, loaded, and run on a model, each for itself."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron.errors import UserError, nearest
from megatron.inference.harness import HarnessModel, own_progress
from megatron.inference.lockstep import Stopped
from megatron.inference.suite_groups import SuiteGroup, load_entry
from megatron.inference.suites import Entry, read_suites
from megatron.log import ProgressBar, get_logger
from megatron.neox_arguments.schema_train import GenerationConfig

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

logger = get_logger(__name__)

BOOTSTRAP = 10_000  # draws for the standard errors, as GPT-NeoX takes
LOCAL_TASKS = "lm_eval_tasks"


class Tasks:
    """The tasks of `eval_tasks` and `eval_suite`, loaded with their data.

    A name is a task, group or tag of the harness's or of the folders in `eval_tasks_path` (also with * and ?), a YAML
    file of a task, or a folder of such files.

    Attributes:
        loaded: tasks and groups by name.
        failed: why a task or group has no results, by name: from the start those that cannot be loaded.

    Raises:
        UserError: a name is not known.
    """

    def __init__(self, options: GenerationConfig) -> None:
        self.options = options
        self.suites = read_suites(options.eval_suite)
        self.names = [*(options.eval_tasks or ()), *(suite.name for suite in self.suites)]
        self._asked = list(options.eval_tasks or ())
        self._entries = {entry.name: entry for suite in self.suites for entry in suite.entries}
        self._all = False
        self.manager = self._read_files()
        self.loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
        self.failed: dict[str, str] = {}
        self._members: dict[str, list[str]] = {}
        for name in self._expand():
            for member in _unknown_members(self.manager, name):
                raise UserError(f"eval_tasks: the group {name} names a task {member!r} that does not exist")
            found = self._load(name)
            self.loaded["tasks"].update(found["tasks"])
            self.loaded["groups"].update(found["groups"])
            self._members[name] = list(found["tasks"])
        self._suite_shots: dict[str, int] = {}
        for entry in self._entries.values():
            self._load_entry(entry)
        for group in self.loaded["groups"].values():
            self._members[group.name] = [task.task_name for task in group.get_all_tasks()]
        for suite in self.suites:
            group = SuiteGroup.of(suite, self.loaded)
            self.loaded["groups"][suite.name] = group
            # Also what could not be loaded at all.
            tasks = [task.task_name for task in group.get_all_tasks()]
            self._members[suite.name] = list(dict.fromkeys([*(entry.name for entry in suite.entries), *tasks]))
        self._set_shots()

    # -- finding them -------------------------------------------------------------------------------

    def _read_files(self) -> TaskManager:
        """The index of task files. Those of the harness, 14,000, take many seconds: only if one of them is meant."""
        from lm_eval.tasks import TaskManager

        names = [*self._asked, *(entry.task for entry in self._entries.values())]
        folders = [*task_folders(self.options), *(name for name in names if Path(name).is_dir())]
        if self._all:
            logger.info("reading the task files of lm-evaluation-harness")
        # Ours come before its own, as documented: no line for each of them. And none for each metric that a task's file
        # leaves to the harness's defaults, which the table of results shows.
        for chatty in ("lm_eval.tasks._index", "lm_eval.api.task"):
            logging.getLogger(chatty).setLevel(logging.ERROR)
        manager = TaskManager(include_path=folders or None, include_defaults=self._all)
        known = all(Path(name).exists() or name in manager.all_tasks for name in names)
        groups = manager.all_groups if any(Path(name).is_dir() for name in names) else names
        known = known and not any(_unknown_members(manager, name) for name in groups)
        if not self._all and not known:
            self._all = True
            return self._read_files()
        return manager

    def _expand(self) -> list[str]:
        """Names with folders and patterns replaced by what they hold or match."""
        found: list[str] = []
        for name in self._asked:
            if name in self.manager.all_tasks or Path(name).is_file():
                found.append(name)
            elif Path(name).is_dir():
                found += _tasks_in(name)
            else:
                found += self._match(name)
        return list(dict.fromkeys(found))

    def _match(self, name: str) -> list[str]:
        matched = self.manager.match_tasks([name]) if any(c in name for c in "*?") else []
        if not matched:
            folders = ", ".join(map(str, task_folders(self.options))) or "none"
            raise UserError(
                f"eval_tasks: there is no task {name!r}.{nearest(name, self.manager.all_tasks)} "
                f"`lm-eval ls tasks` lists them; a YAML file or a folder of them can be given too, and "
                f"eval_tasks_path names folders with tasks of your own (now: {folders})"
            )
        return matched

    def _load(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        try:
            return self.manager.load([name])
        # Whatever the harness, `datasets` and the network raise: there is no common class.
        except Exception as error:
            self.failed[name] = f"cannot be loaded: {type(error).__name__} ({error})"
            logger.warning(f"eval_tasks: {name} {self.failed[name]}")
            # Without a network every member would wait for it as long.
            return {"tasks": {}, "groups": {}} if isinstance(error, ConnectionError) else self._load_members(name)

    def _load_members(self, group: str) -> Mapping[str, Mapping[str, Any]]:
        """What can be loaded of a group that cannot as a whole."""
        found: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
        for member in _members(self.manager, group):
            more = self._load(member)
            for part, loaded in found.items():
                loaded.update(more[part])
        return found

    def _load_entry(self, entry: Entry) -> None:
        """A task of a suite, under its name there."""
        if entry.task not in self.manager.all_tasks and not Path(entry.task).is_file():
            near = nearest(entry.task, self.manager.all_tasks)
            raise UserError(f"eval_suite: there is no task {entry.task!r}.{near}")
        before = set(self.failed)
        found = load_entry(entry, self._load)
        self.failed = {name if name in before else entry.rename(name): why for name, why in self.failed.items()}
        for part, loaded in found.items():
            if twice := sorted(loaded.keys() & self.loaded[part].keys()):
                raise UserError(f"eval_tasks: {', '.join(twice)} is in eval_suite already; name it in one of them")
            self.loaded[part].update(loaded)
        self._suite_shots |= dict.fromkeys(found["tasks"], entry.num_fewshot)

    def require(self) -> None:
        """Raise `UserError` when nothing could be loaded."""
        if not self.loaded["tasks"]:
            name, problem = next(iter(self.failed.items()))
            raise UserError(
                f"eval_tasks: {name} {problem}\n"
                "Its data comes from the Hugging Face Hub unless it is in the cache (HF_HOME) already: load it once on "
                "a machine with a network, or name a task whose data is local."
            )

    # -- running them -------------------------------------------------------------------------------

    def _set_shots(self) -> None:
        """Examples before each question: `eval_num_fewshot` by name, else the suite's, else `eval_num_fewshot` for all,
        else what the task says, else none."""
        asked = self.options.eval_num_fewshot
        by_name = asked if isinstance(asked, dict) else {}
        for name in by_name:
            unknown = not self.failed or name not in self.manager.all_tasks  # what failed may have members
            if unknown and not any(name in known for known in (self._members, self.loaded["tasks"], self.failed)):
                known = [*self._members, *self.loaded["tasks"]]
                raise UserError(f"eval_num_fewshot.{name}: eval_tasks has no such task.{nearest(str(name), known)}")
        for name, task in self.loaded["tasks"].items():
            own = task.get_config("num_fewshot")
            groups = [shots for group, shots in by_name.items() if name in self._members.get(group, ())]
            if name in by_name or groups:
                own = by_name.get(name, groups[0] if groups else None)
            elif name in self._suite_shots:
                own = self._suite_shots[name]
            elif isinstance(asked, int) and own != 0:  # 0 in a task's file means that it has no examples
                own = asked
            task.set_config(key="num_fewshot", value=own or 0)

    def run(self, model: HarnessModel, *, may_fork: bool = True) -> dict[str, Any]:
        """The harness's results, and under "failed" why a task or group has none.

        `may_fork`: errors of metrics without a formula may be drawn in processes of their own; without it such tasks
        have no standard errors.
        """
        from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
        from lm_eval.evaluator_utils import EvalAcc, aggregate_groups

        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        found, failed, started = EvalAcc(), dict(self.failed), time.time()
        with ProgressBar("Running evaluation harness", len(self.loaded["tasks"]), "tasks", ends=True) as bar:
            for name, task in self.loaded["tasks"].items():
                try:
                    _add(found, self._run_one(model, name, task, may_fork))
                except Stopped:
                    raise
                except Exception as error:  # of a task's code, of which there is any
                    if model.team.broken:
                        raise
                    failed[name] = f"{type(error).__name__}: {error}"
                    logger.warning(f"eval_tasks: {name} failed: {failed[name]}")
                bar(1)
        for name, group in self.loaded["groups"].items():
            if without := [member for member in self._members[name] if member in failed]:
                failed[name] = f"without results: {', '.join(without)}"
            else:
                found.groups[name] = group
        try:
            aggregate_groups(found)
        except Exception as error:  # a file of a group that asks for what its tasks do not measure
            failed |= {name: f"{type(error).__name__}: {error}" for name in found.groups}
            found.metrics = {name: metrics for name, metrics in found.metrics.items() if name not in found.groups}
            found.groups = {}
        for name in [name for name, group in found.groups.items() if getattr(group, "problem", "")]:
            failed[name] = found.groups.pop(name).problem
            del found.metrics[name]
        results = dict(found._to_eval_results())
        config = {"model": type(model).__name__, **model.get_model_info(), **_asked(self.options)}
        return {**results, "failed": failed, "config": config, "date": started}

    def _run_one(self, model: HarnessModel, name: str, task: Any, may_fork: bool) -> dict[str, Any]:
        from lm_eval.api.metrics import mean
        from lm_eval.defaults import DEFAULT_OTHER_SEED
        from lm_eval.evaluator import evaluate

        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)  # each run draws the same examples
        has_formula = all(aggregation is mean for aggregation in task.aggregation().values())
        options = self.options
        try:
            with own_progress():
                results = evaluate(
                    lm=model,
                    task_dict={"tasks": {name: task}, "groups": {}},
                    limit=options.eval_task_limit,
                    bootstrap_iters=BOOTSTRAP if may_fork or has_formula else 0,
                    log_samples=False,
                    system_instruction=options.eval_system_instruction,
                    apply_chat_template=options.eval_chat_template,
                    fewshot_as_multiturn=options.eval_chat_template,
                )
        finally:
            task._instances = None  # requests and answers: gigabytes until the next run, which makes them again
        assert results is not None  # rank 0 alone runs this
        return dict(results)


def task_folders(options: GenerationConfig) -> tuple[str, ...]:
    """The folders of `eval_tasks_path`; unset: `lm_eval_tasks` in the current folder, if there is one."""
    if options.eval_tasks_path is not None:
        return options.eval_tasks_path
    return (LOCAL_TASKS,) if Path(LOCAL_TASKS).is_dir() else ()


def _tasks_in(folder: str) -> list[str]:
    """Groups and the tasks outside of them that the files of a folder define."""
    from lm_eval.tasks import TaskManager

    inside = TaskManager(include_path=folder, include_defaults=False)
    if not inside.all_subtasks and not inside.all_groups:
        raise UserError(f"eval_tasks: the folder {folder} holds no task")
    return [*inside.all_subtasks, *inside.all_groups]


def _members(manager: TaskManager, group: str) -> list[str]:
    """The names that the file of a group lists (what it defines inside itself is not among them)."""
    entry = manager.task_index.get(group)
    listed = entry.cfg.get("task") if entry is not None and entry.cfg else None
    return [member for member in listed if isinstance(member, str)] if isinstance(listed, list) else []


def _unknown_members(manager: TaskManager, name: str) -> list[str]:
    """What a group, or a group in it, lists and no file defines."""
    members = _members(manager, name)
    inner = [
        unknown for member in members if member in manager.task_index for unknown in _unknown_members(manager, member)
    ]
    return [member for member in members if member not in manager.task_index] + inner


def _asked(options: GenerationConfig) -> dict[str, Any]:
    keys = ("eval_suite", "eval_num_fewshot", "eval_task_limit", "eval_chat_template", "eval_system_instruction")
    return {key.removeprefix("eval_"): getattr(options, key) for key in keys}


# Where the results of one task are in the harness's accumulator of all, and in what it returns.
_PARTS = {
    "metrics": "results",
    "configs": "configs",
    "versions": "versions",
    "num_fewshot": "n-shot",
    "higher_is_better": "higher_is_better",
    "n_samples": "n-samples",
}


def _add(found: Any, results: Mapping[str, Any]) -> None:
    for attribute, key in _PARTS.items():
        getattr(found, attribute).update(results[key])


def flat_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Results for trackers: `<task>_<metric>`, groups included; a filter's name is added unless it is none."""
    found = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if isinstance(value, float) and chosen:
                found[f"{task}_{metric}" + (f"_{chosen}" if chosen != "none" else "")] = value
    return found


def table(results: Mapping[str, Any]) -> str:
    """Results for people: tasks, then groups, then what failed."""
    from lm_eval.utils import make_table

    parts = [make_table(dict(results))] if results["results"] else []
    if results.get("groups"):
        parts.append(make_table(dict(results), "groups"))
    parts += [f"{name}: no result ({problem})" for name, problem in results["failed"].items()]
    return "\n".join(parts)
