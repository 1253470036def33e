"""lm-eval tasks while training, in whole runs: its scores, what it leaves alone, what stops it and what it survives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.callbacks.task_evaluator import TaskEvaluator
from megatron.checkpoint.find import find_checkpoint
from megatron.inference.evaluate import evaluate
from megatron.inference.lockstep import Lockstep
from megatron.inference.tasks import flat_metrics
from megatron.neox_arguments.inference import for_inference
from tests.distributed import run_distributed
from tests.inference.local_tasks import write_task, write_tasks
from tests.inference.models import GPT_NEOX
from tests.tokenizer.vocabularies import byte_level, write_json
from tests.training import runs
from tests.training.runs import Report, corpus, run
from tests.training.tiny import Layout

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

# A model that transformers has, dropout included: random states that differ would show in the losses.
KEYS = {
    **GPT_NEOX,
    "norm": "layernorm",
    "activation": "gelu",
    "intermediate_size": None,
    "num_kv_heads": 4,
    "hidden_dropout": 0.1,
    "tokenizer_type": "HFTokenizer",
    "save": None,
    "train_iters": 2,
    "eval_interval": 2,
}
SPREAD_OUT = Layout(pp=2, tp=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that evaluates a group and a task of a folder."""
    folder = tmp_path_factory.mktemp("tasks")
    declared = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    vocab_file = write_json(folder / "tokenizer" / "tokenizer.json", byte_level(), tokenizer_config=declared)
    write_tasks(folder)
    names = {"eval_tasks_path": [str(folder)], "eval_tasks": ["local_group", "local_rolling", "local_writing"]}
    return {**KEYS, **names, "vocab_file": str(vocab_file), "data_path": corpus(folder / "data")}


def scores(report: Report, step: int) -> dict[str, float]:
    (found,) = [metrics for at, split, metrics in report.evaluated if (at, split) == (step, "eval_tasks")]
    return found


def evaluate_checkpoint(rank: int, world: int, keys: dict[str, Any], layout: Layout, folder: str) -> dict[str, float]:
    """What `eval.py` reports."""
    with mock.patch.object(runs, "derive", lambda args, facts: runs_derive(for_inference(args), facts)):
        process = runs.process_of(rank, {**keys, "load": keys["save"]}, layout)
    found: dict[str, float] = {}
    os.chdir(folder)
    assert evaluate(process, lambda metrics, step: found.update(metrics)) == 0
    return {name.removeprefix("eval/"): value for name, value in found.items()}


runs_derive = runs.derive


def evaluate_export(keys: dict[str, Any], folder: Path) -> dict[str, float]:
    """What the harness's own adapter makes of the exported model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron.convert.hf.export_hf import export

    exported = export(find_checkpoint(keys["save"], None, "save").path, folder).folder
    model = HFLM(pretrained=str(exported), dtype="float32", batch_size=2, device="cpu", logits_cache=False)
    manager = TaskManager(include_path=keys["eval_tasks_path"], include_defaults=False)
    names = keys["eval_tasks"]
    return flat_metrics(simple_evaluate(model, tasks=names, task_manager=manager, log_samples=False, bootstrap_iters=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any]) -> tuple[list[Report], str, str]:
    """The ranks of a run that evaluates, what they printed, and its folder."""
    save = str(tmp_path_factory.mktemp("trained") / "save")
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        reports = run({**keys, "save": save}, SPREAD_OUT)
    return reports, shown.getvalue(), save


def test_scores_equal_those_of_the_checkpoint_and_its_export(
    tmp_path: Path, keys: dict[str, Any], trained: tuple[list[Report], str, str]
):
    reports, text, save = trained
    keys = {**keys, "save": save}
    assert [(step, split) for step, split, _ in reports[0].evaluated] == [(0, "eval_tasks"), (2, "eval_tasks")]
    assert all(report.evaluated == reports[0].evaluated for report in reports)
    found = scores(reports[0], 2)
    names = {name.split("_acc")[0] for name in found if "_acc" in name and "stderr" not in name}
    assert names == {"local_choice", "local_other", "local_group"}
    assert found["local_rolling_byte_perplexity"] != scores(reports[0], 0)["local_rolling_byte_perplexity"] > 1
    assert 0 < found["local_writing_exact_match"] < 1
    other = run_distributed(evaluate_checkpoint, 2, keys, Layout(dp=2), str(tmp_path))[0]
    assert {name: other[name] for name in found} == pytest.approx(found, rel=1e-4)
    theirs = evaluate_export(keys, tmp_path / "hf")
    assert theirs == pytest.approx({name: found[name] for name in theirs}, rel=1e-4) and len(theirs) == 8

    assert "Running evaluation harness at iteration 2" in text and "Evaluation results at iteration 2" in text
    assert any("%|" in line and "Running evaluation harness" in line for line in text.splitlines())
    results = json.loads(Path(save, "eval_results", "iteration_2.json").read_text())
    assert results["groups"]["local_group"]["acc,none"] == found["local_group_acc"] and results["failed"] == {}
    assert results["n-samples"]["local_choice"]["effective"] == 9
    lines = [json.loads(line) for line in Path(save, "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 2 and any(line.get("eval_tasks/local_group_acc") for line in lines)


def test_the_run_is_the_same_without_it(keys: dict[str, Any], trained: tuple[list[Report], str, str]):
    without = run({**keys, "eval_tasks": None}, SPREAD_OUT)
    for report, bare in zip(trained[0], without, strict=True):
        assert report.exit_code == bare.exit_code == 0 and len(report.loss) == 2
        assert (report.loss, report.grad_norm, report.tokens) == (bare.loss, bare.grad_norm, bare.tokens)
        assert report.state == bare.state and bare.evaluated == []


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), Layout(dp=2, pp=2, zero=1)], ids=lambda layout: layout.name)
def test_the_layout_makes_no_difference(keys: dict[str, Any], trained: tuple[list[Report], str, str], layout: Layout):
    (report, *_) = run({**keys, "train_iters": 1}, layout)
    assert report.exit_code == 0 and report.steps == [1]
    assert scores(report, 0) == pytest.approx(scores(trained[0][0], 0), rel=1e-4)


def tensor_bytes() -> int:
    """Memory of all tensors of this process."""
    import gc

    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def train_and_weigh(rank: int, world: int, keys: dict[str, Any]) -> tuple[Report, list[int]]:
    weights: list[int] = []
    before_pass = Lockstep.before_pass

    def weigh(self: Lockstep) -> None:
        weights.append(tensor_bytes())
        before_pass(self)

    with mock.patch.object(Lockstep, "before_pass", weigh):
        return runs.train(rank, world, keys, Layout(), runs.Faults()), weights


def test_a_task_that_fails_loses_no_other_and_nothing_is_kept_twice(tmp_path: Path, keys: dict[str, Any]):
    folder = tmp_path / "more"
    write_tasks(folder)
    write_task(folder, "local_long", document={"choices": [" x" * 100, "b"]})  # more than the model's positions
    write_task(folder, "local_lost", missing=True)
    (folder / "broken.yaml").write_text("group: local_broken\ntask: [local_choice, local_lost]\n")
    names = ["local_long", "local_broken", "local_writing", "local_choice"]
    asked = {
        "eval_tasks_path": [str(folder)],
        "eval_tasks": names,
        "eval_task_limit": 5,
        "save": str(tmp_path / "save"),
    }
    (report, weights), *_ = run_distributed(train_and_weigh, 1, {**keys, **asked, "train_iters": 1}, timeout=110)
    assert report.exit_code == 0 and report.steps == [1]
    assert set(scores(report, 1)) >= {"local_choice_acc", "local_writing_exact_match"}
    assert not any(name.startswith(("local_long", "local_broken")) for name in scores(report, 1))
    results = json.loads((tmp_path / "save" / "eval_results" / "iteration_1.json").read_text())
    assert set(results["failed"]) == {"local_long", "local_broken", "local_lost"}
    assert "positions" in results["failed"]["local_long"] and "local_lost" in results["failed"]["local_broken"]
    assert results["n-samples"]["local_choice"] == {"original": 9, "effective": 5}
    # Between passes there are the run's own tensors, the keys and values of a batch (at most 2 * 2 layers * 2 texts *
    # 26 tokens * 32 numbers), and little else. A second copy of the weights would be 98 kB.
    first = weights[: len(weights) // 2]
    assert max(first) - min(first) < 4 * 2 * 2 * 2 * 26 * 32 + 4_000


def train_and_break(rank: int, world: int, keys: dict[str, Any]) -> str:
    """Every pass of an evaluation after a step fails as it does without memory."""
    lack = mock.Mock(side_effect=torch.OutOfMemoryError("no memory for a pass"))
    with mock.patch.object(TaskEvaluator, "loaded"), mock.patch.object(Lockstep, "before_pass", lack):
        try:
            return runs.train(rank, world, keys, Layout(), runs.Faults()).error
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize(("iterations", "every"), [(2, 1), (1, 5)], ids=["between", "at the end"])
def test_an_evaluation_that_ends_the_run_comes_after_the_checkpoint(
    tmp_path: Path, keys: dict[str, Any], iterations: int, every: int
):
    keys = {**keys, "save": str(tmp_path / "save"), "train_iters": iterations, "eval_tasks": ["local_writing"]}
    keys |= {"eval_interval": every, "checkpoint_factor": every}
    assert run_distributed(train_and_break, 1, keys) == ["no memory for a pass"]
    assert find_checkpoint(keys["save"], None, "save").manifest.step == 1


def train_and_stop(rank: int, world: int, keys: dict[str, Any], layout: Layout, at: int) -> tuple[Report, int]:
    """The last rank gets a signal before its pass `at`; also how many passes this rank made."""
    passes = 0
    before_pass = Lockstep.before_pass

    def count(self: Lockstep) -> None:
        nonlocal passes
        passes += 1
        if rank == world - 1 and passes == at:
            os.kill(os.getpid(), signal.SIGTERM)
        before_pass(self)

    # Before the first step a signal ends the start at once.
    with mock.patch.object(Lockstep, "before_pass", count), mock.patch.object(TaskEvaluator, "loaded"):
        return runs.train(rank, world, keys, layout, runs.Faults()), passes


def test_a_signal_to_one_rank_ends_the_evaluation_after_its_pass(tmp_path: Path, keys: dict[str, Any]):
    keys = {**keys, "save": str(tmp_path / "save"), "eval_interval": 1, "train_iters": 4}
    layout = Layout(dp=2, pp=2)
    for report, passes in run_distributed(train_and_stop, layout.world, keys, layout, 2, timeout=110):
        assert (report.steps, report.exit_code, report.evaluated) == ([1, 2], 3, []) and "SIGTERM" in report.error
        assert 2 <= passes <= 2 * (2 + layout.pp)  # and in the evaluation of the step that agrees to stop
    assert find_checkpoint(keys["save"], None, "save").manifest.step == 2


def train_with_local_tasks(rank: int, world: int, keys: dict[str, Any]) -> Report:
    """Without the harness's own task files, which take long to read."""
    from lm_eval.tasks import TaskManager

    def only_local(include_path: Any, include_defaults: bool) -> TaskManager:
        return TaskManager(include_path=include_path, include_defaults=False)

    with mock.patch("lm_eval.tasks.TaskManager", only_local):
        return runs.train(rank, world, keys, Layout(dp=world), runs.Faults())


def test_an_unknown_task_is_refused_before_a_step(keys: dict[str, Any]):
    for report in run_distributed(train_with_local_tasks, 2, {**keys, "eval_tasks": ["local_chioce"]}):
        assert report.exit_code == 2 and not report.steps
        assert (
            "'local_chioce'. Did you mean 'local_choice'?" in report.error
            and keys["eval_tasks_path"][0] in report.error
        )
