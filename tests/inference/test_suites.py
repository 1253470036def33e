"""Suites of tasks: each with its own examples and name, and averages as the harness itself computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.errors import UserError
from megatron.inference.suites import names, read_suites
from megatron.inference.tasks import Tasks, flat_metrics, table
from megatron.neox_arguments.schema_train import GenerationConfig
from tests.inference.local_tasks import CHOICE, write_task
from tests.inference.test_harness import Model, record_prompts

pytestmark = pytest.mark.cpu

WITH_EXAMPLES = {**CHOICE, "fewshot_split": "train"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), bos=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local tasks under the names of the harness's, with 11 to 14 documents each; MMLU has two subjects."""
    folder = tmp_path_factory.mktemp("tasks")
    of_core = {entry.task for entry in read_suites(("core",))[0].entries}
    for number, name in enumerate([*sorted(of_core), "mmlu_first", "mmlu_other"]):
        write_task(folder, name, WITH_EXAMPLES, number=11 + number % 4)
    metrics = [{"metric": "acc", "weight_by_size": True}]
    group = {"group": "mmlu", "task": ["mmlu_first", "mmlu_other"], "aggregate_metric_list": metrics}
    (folder / "mmlu.yaml").write_text(yaml.safe_dump(group))
    return folder


def asked(folder: Path, *suites: str, **keys: Any) -> GenerationConfig:
    return GenerationConfig(eval_suite=suites, eval_tasks_path=(str(folder),), **keys)


def test_core_is_the_harness_own_tasks_examples_and_average(model: Model, folder: Path):
    from lm_eval import simple_evaluate
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    tasks, adapter = Tasks(asked(folder, "core")), model.ours()
    prompts = record_prompts(adapter)
    results = tasks.run(adapter)
    assert not results["failed"]
    entries = read_suites(("core",))[0].entries
    theirs: dict[str, Any] = {}
    asked_of_theirs: list[str] = []
    for shots in (0, 3, 10):
        part = [one for one in entries if one.num_fewshot == shots]
        adapter = model.ours()
        own = record_prompts(adapter)
        found = simple_evaluate(
            model=adapter,
            tasks=[one.task for one in part],
            num_fewshot=shots,
            bootstrap_iters=100,
            task_manager=tasks.manager,
            log_samples=False,
        )
        theirs |= {one.name: found["results"][one.task] for one in part}
        asked_of_theirs += own
    assert sorted(prompts) == sorted(asked_of_theirs)  # the same questions, each with its examples
    for name, metrics in theirs.items():
        for metric in ("acc,none", "acc_stderr,none", "acc_norm,none"):
            assert results["results"][name][metric] == pytest.approx(metrics[metric], rel=1e-5), (name, metric)
    group = Group("core", aggregate_metric_list=[AggMetricConfig("acc", weight_by_size=False)])
    for entry in entries:
        group.add(tasks.loaded["tasks"][entry.name])
    expected = group.aggregate(theirs)
    assert len(theirs) == 13 and results["groups"]["core"]["macro,none"] == pytest.approx(expected["acc,none"])
    assert results["groups"]["core"]["macro_stderr,none"] == pytest.approx(expected["acc_stderr,none"])
    by_size = Group("core", aggregate_metric_list=[AggMetricConfig("acc")], _children=group._children).aggregate(theirs)
    assert by_size["acc,none"] != pytest.approx(expected["acc,none"], rel=1e-6)
    assert flat_metrics(results)["core_macro"] == results["groups"]["core"]["macro,none"]
    assert "hellaswag_10shot" in table(results) and "macro" in table(results)


def test_a_group_counts_once_and_its_tasks_have_names_of_the_suite(model: Model, folder: Path):
    tasks = Tasks(asked(folder, "mmlu_0", "mmlu_5", "core_mmlu", eval_num_fewshot={"mmlu_5shot_other": 2}))
    shots = {name: task.get_config("num_fewshot") for name, task in tasks.loaded["tasks"].items() if "mmlu" in name}
    five = {"mmlu_5shot_first": 5, "mmlu_5shot_other": 2}
    assert shots == {"mmlu_0shot_first": 0, "mmlu_0shot_other": 0, **five}
    results = tasks.run(model.ours())
    assert not results["failed"]
    values = {name: found["acc,none"] for name, found in results["results"].items() if "acc,none" in found}
    n = {name: found["effective"] for name, found in results["n-samples"].items()}
    for group in ("mmlu_0shot", "mmlu_5shot"):
        first, other = f"{group}_first", f"{group}_other"
        expected = (values[first] * n[first] + values[other] * n[other]) / (n[first] + n[other])
        assert values[group] == pytest.approx(expected)
    macro = {name: group["macro,none"] for name, group in results["groups"].items() if "macro,none" in group}
    assert macro["mmlu_5"] == values["mmlu_5shot"]
    of_all = [values[entry.name] for entry in read_suites(("core_mmlu",))[0].entries]
    assert len(of_all) == 15 and macro["core_mmlu"] == pytest.approx(sum(of_all) / 15)
    assert results["group_subtasks"]["mmlu_5shot"] == ["mmlu_5shot_first", "mmlu_5shot_other"]


def test_a_suite_with_a_task_that_fails_has_no_average(model: Model, folder: Path, tmp_path: Path):
    write_task(tmp_path, "local_lost", WITH_EXAMPLES, missing=True)
    (tmp_path / "mine.yml").write_text(
        "tasks:\n- {task: arc_easy, num_fewshot: 1}\n- {task: local_lost, num_fewshot: 0, alias: lost}\n"
    )
    (tmp_path / "other.yml").write_text("tasks:\n- {task: piqa, num_fewshot: 0, metric: f1}\n")
    mine, other = str(tmp_path / "mine.yml"), str(tmp_path / "other.yml")
    options = GenerationConfig(eval_suite=(mine, other, "mmlu_0"), eval_tasks_path=(str(folder), str(tmp_path)))
    results = Tasks(options).run(model.ours())
    assert results["failed"].keys() == {"lost", "mine", "other"} and "lost" in results["failed"]["mine"]
    assert "piqa" in results["failed"]["other"] and "f1,none" in results["failed"]["other"]
    assert results["groups"].keys() == {"mmlu_0shot", "mmlu_0"} and "acc,none" in results["results"]["arc_easy"]


def _suites(folder: Path, **files: str) -> Callable[[], Any]:
    for name, text in files.items():
        (folder / f"{name}.yml").write_text(text)
    return lambda: read_suites(tuple(str(folder / f"{name}.yml") for name in files))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: [cor]", r"no suite 'cor'\. Did you mean 'core'\?"),
        ("tasks: [{task: a}]", "task 1: num_fewshot is missing"),
        ("tasks: [{task: a, num_fewshot: 1}, {task: a, num_fewshot: -1}]", "task 2: num_fewshot is -1"),
        ("tasks: [{task: a, num_fewshot: 1, shots: 3}]", "task 1: .*shots.*num_fewshot"),
        ("tasks: [{task: a, num_fewshot: 1}, {task: a, num_fewshot: 2}]", "two tasks named a"),
        ("include: [one.yml]", "includes itself"),
        ("tasks: []", "has no tasks"),
        ("- a", "needs `tasks`"),
        ("tasks: [", "cannot be read"),
    ],
)
def test_wrong_suites_are_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=rf"eval_suite: .*{message}"):
        _suites(tmp_path, one=text)()


def test_two_suites_may_share_a_task_but_not_a_name(tmp_path: Path, folder: Path):
    one = "tasks: [{task: arc_easy, num_fewshot: 1}, {task: piqa, num_fewshot: 2, alias: p}]"
    assert len(_suites(tmp_path, one=one, two="include: [one.yml]")()) == 2
    with pytest.raises(UserError, match=r"eval_suite: .*named p: .*num_fewshot=3.*num_fewshot=2"):
        _suites(tmp_path, one=one, two="tasks: [{task: piqa, num_fewshot: 3, alias: p}]")()
    with pytest.raises(UserError, match=r"eval_tasks: arc_easy is in eval_suite"):
        Tasks(asked(folder, "core", eval_tasks=("arc_easy",)))


@pytest.mark.slow
def test_the_harness_has_every_task_and_metric_of_our_suites():
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    index = TaskManager().task_index
    assert len(names()) == 7

    def metrics_of(name: str) -> set[str]:
        config = load_yaml(index[name].yaml_path, resolve_func=False)
        if "metric_list" in config:
            filters = [one["name"] for one in config.get("filter_list") or ()] or ["none"]
            return {f"{one['metric']},{kind}" for one in config["metric_list"] for kind in filters}
        listed = config["aggregate_metric_list"]
        return {f"{one['metric']},{one.get('filter_list', 'none')}" for one in listed}

    for suite in read_suites(tuple(names())):
        for entry in suite.entries:
            assert entry.result in metrics_of(entry.task), (suite.name, entry)
