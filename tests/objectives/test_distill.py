"""`train_impl: distill`: loss and gradient against TRL and closed formulas, and whole runs at other layouts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from trl.experimental.gkd.gkd_trainer import GKDTrainer

from megatron.neox_arguments.schema_post import PostConfig
from megatron.objectives.distill import DistillObjective
from tests.model.networks import batch, build, logits, tiny
from tests.training.runs import corpus, run
from tests.training.tiny import LLAMA, Layout

pytestmark = pytest.mark.cpu

GUIDE = Path(__file__).parents[2] / "documentation" / "distillation.md"
# TRL's one number: 0 is forward, 1 reverse.
KINDS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}


def _teacher(shape: torch.Size, vocab: int) -> torch.Tensor:
    return torch.randn(*shape, vocab, generator=torch.Generator().manual_seed(5)) * 2


def _ours(
    options: dict[str, Any], top_k: int, teacher: torch.Tensor, temperature: float
) -> tuple[float, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Loss, gradients, our logits, mask."""
    tokens, positions, targets = batch(rows=3)
    network = build(tiny())
    mask = (torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.6).float()
    logprobs = torch.log_softmax(teacher / temperature, -1)
    ids = torch.zeros(*targets.shape, 0)
    if top_k:
        logprobs, where = logprobs.topk(top_k)
        ids = where.float()
    objective = DistillObjective(PostConfig(distill_temperature=temperature, **options))
    out = network((tokens, positions))
    loss, metrics = objective(out, (targets, mask, 1 / mask.sum().reshape(1), ids, logprobs))
    loss.backward()
    assert metrics.shape == (2,)
    gradients = [p.grad.clone() for p in network.parameters()]
    return float(loss.detach()), gradients, logits(network, tokens, positions), mask


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_vocabulary_is_as_in_trl(kind: str, temperature: float) -> None:
    tokens, positions, targets = batch(rows=3)
    network = build(tiny())
    student = logits(network, tokens, positions)
    teacher = _teacher(targets.shape, student.shape[-1])
    options = {"distill_loss": kind, "distill_jsd_beta": KINDS[kind] or 0.5}
    loss, gradients, _, mask = _ours(options, 0, teacher, temperature)
    labels = targets.masked_fill(mask == 0, -100)
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels, KINDS[kind], temperature) * temperature**2
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for ours, p in zip(gradients, network.parameters(), strict=True):
        assert torch.allclose(ours, p.grad, rtol=1e-4, atol=1e-5 * float(p.grad.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_of_the_likeliest_count_as_one(kind: str) -> None:
    """In fp64, from the definitions; with all but one told apart it is the divergence of the whole."""
    _, _, targets = batch(rows=3)
    student = logits(build(tiny()), *batch(rows=3)[:2])
    vocab = student.shape[-1]
    teacher = _teacher(targets.shape, vocab)
    beta = 0.25
    options = {"distill_loss": kind, "distill_jsd_beta": beta, "distill_weight": 0.75}
    for top_k in (1, 7, vocab - 1):
        loss, _, _, mask = _ours(options, top_k, teacher, 1.0)
        p, q = teacher.double().softmax(-1), student.detach().double().softmax(-1)
        where = p.topk(top_k).indices
        p, q = (torch.cat([x.gather(-1, where), 1 - x.gather(-1, where).sum(-1, keepdim=True)], -1) for x in (p, q))
        m = beta * p + (1 - beta) * q
        of = {
            "forward_kl": (p * (p / q).log()).sum(-1),
            "reverse_kl": (q * (q / p).log()).sum(-1),
            "jsd": (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1),
        }[kind]
        hard = F.cross_entropy(student.detach().double().flatten(0, 1), targets.flatten(), reduction="none")
        each = 0.75 * of.flatten() + 0.25 * hard
        assert loss == pytest.approx(float((each * mask.flatten()).sum() / mask.sum()), rel=1e-5)


def test_a_run_learns_from_a_teacher_of_another_layout(tmp_path: Path) -> None:
    keys = {**LLAMA, "data_path": corpus(tmp_path / "text"), "eval_iters": 1, "eval_interval": 3}
    teacher = {"num_layers": 3, "hidden_size": 48, "num_kv_heads": 4, "intermediate_size": 64, "train_iters": 2}
    made = run({**keys, **teacher, "save": str(tmp_path / "teacher")}, Layout(tp=2))
    assert {one.error for one in made} == {""}
    more = {
        "train_impl": "distill",
        "distill_teacher": str(tmp_path / "teacher"),
        "distill_top_k": 20,
        "train_iters": 3,
    }
    student = str(tmp_path / "student")
    alone = run({**keys, **more, "save": student, "checkpoint_factor": 2})[0]
    assert alone.error == "" and alone.loss[-1] < alone.loss[0]
    names = {name for _, metrics in alone.logged for name in metrics}
    assert {"train/divergence", "train/cross_entropy"} <= names
    for layout in (Layout(pp=2, tp=2), Layout(tp=2, sequence_parallel=True), Layout(dp=2, zero=3, micro=1)):
        for report in run({**keys, **more}, layout):
            assert report.error == "" and report.loss == pytest.approx(alone.loss, rel=1e-5)
            assert report.evaluated[0][2]["lm_loss"] == pytest.approx(alone.evaluated[0][2]["lm_loss"], rel=1e-5)
    experts = {"moe_num_experts": 2, "moe_router_type": "topk", "hidden_dropout": 0}
    for report in run({**keys, **more, **experts}, Layout(dp=2, ep=2, micro=1)):  # the teacher has none
        assert report.error == "" and report.steps == [1, 2, 3]
    # A resumed run keeps its teacher, whose own run goes on.
    assert not run({**keys, **teacher, "train_iters": 3, "save": str(tmp_path / "teacher")})[0].error
    again = {"load": student, "iteration": 2, "save": str(tmp_path / "again")}
    resumed = run({**keys, **more, **again})[0]
    assert resumed.error == "" and resumed.steps == [3] and resumed.loss == alone.loss[2:]
    shutil.rmtree(tmp_path / "teacher" / "global_step2")
    lost = run({**keys, **more, **again, "save": str(tmp_path / "lost")})[0]
    assert lost.exit_code == 2 and "global_step2, which this run has used so far, is not there" in lost.error
    missing = run({**keys, **more, "distill_teacher": str(tmp_path / "nobody")})[0]
    assert "distill_teacher" in missing.error and missing.exit_code == 2


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a run with a teacher of three blocks, of another layout."""
    folder = tmp_path_factory.mktemp("teacher")
    keys = {**LLAMA, "data_path": corpus(folder / "text"), "eval_iters": 1, "eval_interval": 3}
    other = {"num_layers": 3, "train_iters": 2, "init_method_std": 0.3}
    made = run({**keys, **other, "save": str(folder / "teacher")}, Layout(tp=2))
    assert {one.error for one in made} == {""}
    return {**keys, "distill_teacher": str(folder / "teacher"), "distill_top_k": 20, "train_iters": 4}


def test_a_teacher_that_read_everything_before_is_as_one_in_memory(teacher: dict[str, Any], tmp_path: Path) -> None:
    """Also when it is gone: other layouts and a run that goes on read the same rows."""
    learns = {"train_impl": "distill", "distill_weight": 0.7, "distill_temperature": 1.5}
    keys = {**teacher, **learns}
    beside = run({**keys, "save": str(tmp_path / "beside"), "checkpoint_factor": 2})[0]
    assert beside.error == "" and beside.logged[0][1]["train/divergence"] > 0.1
    gone = shutil.copytree(keys["distill_teacher"], tmp_path / "teacher")
    keys |= {"distill_teacher": str(gone), "distill_precompute": True, "reference_path": str(tmp_path / "rows")}
    before = run({**keys, "save": str(tmp_path / "before"), "checkpoint_factor": 2}, Layout(pp=2, dp=2))[0]
    assert before.error == "" and before.loss == pytest.approx(beside.loss, rel=1e-6)
    (store,) = (tmp_path / "rows").glob("teacher-*")
    rows = sum(path.stat().st_size for path in store.glob("*.rows")) // (4 * 16 * 2 * 20)
    assert rows == 4 * 8 + 2 * 8 + 8  # of training, validation and test
    written = sorted(store.glob("*.rows"))
    for layout in (Layout(), Layout(tp=2, sequence_parallel=True)):
        for report in run(keys, layout):
            assert report.error == "" and report.loss == pytest.approx(beside.loss, rel=1e-6)
            assert report.evaluated[0][2]["lm_loss"] == pytest.approx(beside.evaluated[0][2]["lm_loss"], rel=1e-6)
    assert sorted(store.glob("*.rows")) == written
    apart = {"intra_document_masking": True, "train_iters": 2}  # the teacher sees documents apart, too
    assert run({**keys, **apart})[0].loss == pytest.approx(run({**teacher, **learns, **apart})[0].loss, rel=1e-6)
    shutil.rmtree(gone)
    again = {"load": str(tmp_path / "before"), "iteration": 2, "save": str(tmp_path / "again")}
    resumed = run({**keys, **again})[0]
    assert resumed.error == "" and resumed.loss == pytest.approx(beside.loss[2:], rel=1e-6)
    longer = run({**keys, **again, "train_iters": 6, "save": str(tmp_path / "longer")})[0]
    assert longer.exit_code == 2 and "distill_teacher" in longer.error


def test_a_plugin_compares_hidden_states_with_the_teachers(teacher: dict[str, Any], tmp_path: Path) -> None:
    """The guide's."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "hidden.py").write_text(code)
    plugin = {"plugins": [str(tmp_path / "hidden.py")], "train_impl": "distill_hidden", "distill_layers": [0, 1]}
    keys = {**teacher, **plugin}
    same = {"load": keys["distill_teacher"], "finetune": True, "num_layers": 3, "train_iters": 1}
    for layers, least, most in (([1, 1], 0.0, 1e-12), ([0, 1], 0.01, 100.0)):  # of a model that is its own teacher
        report = run({**keys, **same, "distill_layers": layers})[0]
        assert report.error == "" and least <= report.logged[0][1]["train/hidden_distance"] < most
    alone = run(keys)[0]
    assert alone.error == ""
    for layout in (Layout(pp=2, tp=2, sequence_parallel=True), Layout(dp=2, zero=3, micro=1)):
        for report in run(keys, layout):
            assert report.error == "" and report.loss == pytest.approx(alone.loss, rel=1e-5)
