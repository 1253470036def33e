"""Steps that forget: against plain torch, at every layout, and in whole runs that stop and go on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.find import open_checkpoint
from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.order.by_step import ByStep, SourceCounts
from megatron.data.sample import Sample
from megatron.errors import UserError
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.forget_steps import SOURCES
from megatron.run.frozen import FrozenStates
from tests.distributed import run_distributed
from tests.neox_args.helpers import derived
from tests.training.models import ADAM, NEOX
from tests.training.runs import Report, corpus, run
from tests.training.test_reference import hf_twin, lr_at, neox_weights, unpad
from tests.training.tiny import BATCH, SEQUENCE, VOCAB, Layout, Samples, build

pytestmark = pytest.mark.cpu

STEPS = 8  # of which 3 and 6 forget
FORGET: dict[str, Any] = {
    "ga_dataset": "x",
    "ga_mode": "interleaved",
    "ga_interleave_ratio": 2,
    "ga_lr_scale": 0.5,
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ascent": FORGET,
    "difference": {**FORGET, "gd_mode": True, "gd_retain_dataset": "y", "gd_retain_weight": 3.0},
    "npo": {**FORGET, "gd_mode": True, "gd_retain_dataset": "y", "gd_retain_weight": 2.0, "ga_loss": "npo"},
    "simnpo": {**FORGET, "ga_loss": "simnpo", "ga_beta": 2.5, "ga_gamma": 0.125},
    "rmu": {
        **FORGET,
        "gd_mode": True,
        "gd_retain_dataset": "y",
        "gd_retain_weight": 30.0,
        "ga_loss": "rmu",
        "ga_rmu_layer": 0,
        "ga_rmu_coefficient": 3.0,
        "ga_rmu_seed": 7,
        "ga_rmu_layers": [],
    },
}


class SourceSamples:
    """The samples of one source: of three documents, some tokens and one row of a step not trained, with the
    log-probabilities of a reference model."""

    def __init__(self, place: int) -> None:
        self.first = 8000 * place

    def __getitem__(self, number: int) -> Sample:
        sample = Samples()[self.first + number]
        reference = -4 * np.random.RandomState(self.first + number).rand(SEQUENCE + 1)
        return dataclasses.replace(sample, extras={"reference": reference})


def steps_of(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Start weights on one rank, and the curve."""
    engine, args, lr = build(rank, keys, layout)
    plan = BatchPlan.of(args)
    counts = SourceCounts(plan, 0, {}, STEPS)
    loader = StepLoader(
        ByStep(counts, {name: SourceSamples(i) for i, name in enumerate(SOURCES)}),  # type: ignore[misc]
        micro_batch=args.training.train_micro_batch_size_per_gpu or 0,
        gas=args.training.gradient_accumulation_steps or 0,
        rules=CollateRules(SEQUENCE, vocab_size=VOCAB, reads=engine.objective.reads),
        dp_rank=engine.state.dp_rank,
        dp_size=engine.state.dp_size,
        plan=plan,
    )
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "metrics": [], "lr": []}
    if world == 1:
        found["start"] = {n: p.detach().clone().double() for n, p in engine.params().items()}
    frozen = FrozenStates.of(args)
    if frozen is not None:
        frozen.engine = engine
        engine.keep_reference()
    for step in range(STEPS):
        batch = loader.read(plan.samples(step), step)
        if world == 1 and step == 6:
            engine.before_update = lambda: found.update(gradient={n: g.clone() for n, g in engine.grads().items()})
        out = engine.train_batch(batch if frozen is None else frozen.told(batch), lr(step))
        engine.before_update = None
        found["loss"].append(float(out.loss))
        found["grad_norm"].append(float(out.grad_norm))
        found["metrics"].append({name: float(value) for name, value in out.metrics.items()})
        found["lr"].append(lr(step))
    return found


@functools.cache
def one_rank(name: str, micro: int = 8) -> dict[str, Any]:
    keys = {**NEOX, "num_kv_heads": 4, **ADAM, **OBJECTIVES[name]}
    return run_distributed(steps_of, 1, keys, Layout(micro=micro), timeout=120)[0]


# The unit vector of rmu with seed 7.
DIRECTION = torch.rand(32, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
DIRECTION /= (DIRECTION**2).sum() ** 0.5


def softplus(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.exp()).log()


def plain_loss(
    model: Any, begun: Any, name: str, sources: list[tuple[str, int]]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss of a step, and what is logged of it; `begun`: the model before the first step; `sources`: (source, its
    first sample)."""
    keys, loss, metrics = OBJECTIVES[name], torch.zeros((), dtype=torch.float64), {}
    for source, first in sources:
        losses: list[torch.Tensor] = []
        apart: list[torch.Tensor] = []  # squared distances of features, of trained tokens
        answers: list[tuple[torch.Tensor, torch.Tensor]] = []  # log-probabilities of trained tokens, those of reference
        for number in range(first, first + BATCH):
            sample = SourceSamples(SOURCES.index(source))[number]
            tokens = torch.from_numpy(sample.tokens)
            labels, starts = sample.labels, sample.starts
            assert labels is not None and starts is not None
            reference = torch.from_numpy(sample.extras["reference"])
            out = model(tokens[None, :-1], output_hidden_states=True)
            log_probs = out.logits[0].log_softmax(-1)
            trained = [t - 1 for t in range(1, SEQUENCE + 1) if labels[t] >= 0]
            target = 3.0 * DIRECTION
            if source == "retain":
                with torch.no_grad():
                    target = begun(tokens[None, :-1], output_hidden_states=True).hidden_states[1][0, trained]
            apart.append((out.hidden_states[1][0, trained] - target) ** 2)
            for begin, end in zip(starts, [*starts[1:], SEQUENCE + 1], strict=True):
                places = [t for t in range(max(begin, 1), end) if labels[t] >= 0]
                of_answer = log_probs[[t - 1 for t in places], tokens[places]]
                losses.append(-of_answer)
                if places:
                    answers.append((of_answer, reference[places]))
        mean = torch.cat(losses).mean()
        if source == "train":
            loss = loss + mean
        elif source == "retain":
            metrics["gd_retain_loss"] = mean.item()
            if name == "rmu":
                mean = torch.cat(apart).mean()
                metrics["rmu_retain_distance"] = mean.item()
            loss = loss + keys["gd_retain_weight"] * mean
        else:
            metrics["gd_forget_loss" if keys.get("gd_mode") else "ga_actual_loss"] = mean.item()
            if name == "npo":
                loss = loss + torch.stack([2 / 0.1 * softplus(0.1 * (a - b).sum()) for a, b in answers]).mean()
            elif name == "simnpo":
                loss = loss + torch.stack([2 / 2.5 * softplus(2.5 * a.mean() + 0.125) for a, _ in answers]).mean()
            elif name == "rmu":
                loss = loss + torch.cat(apart).mean()
                metrics["rmu_forget_distance"] = torch.cat(apart).mean().item()
            else:
                loss = loss - mean
            metrics["gd_combined_loss" if keys.get("gd_mode") else "ga_objective"] = math.nan
    return loss, {one: loss.item() if value != value else value for one, value in metrics.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_steps_that_forget_equal_plain_torch(name: str) -> None:
    """transformers' model, torch's AdamW and clip in fp64, one row at a time; ascent at the steps 3 and 6."""
    ours = one_rank(name)
    model = hf_twin("neox")
    model.load_state_dict({n: unpad(n, v) for n, v in neox_weights(ours["start"]).items()}, strict=False)
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-4)
    begun = copy.deepcopy(model)
    taken = dict.fromkeys(SOURCES, 0)
    for step in range(STEPS):
        forgets = step in (3, 6)
        names = ("train",) if not forgets else ("forget", "retain") if OBJECTIVES[name].get("gd_mode") else ("forget",)
        loss, metrics = plain_loss(model, begun, name, [(one, taken[one]) for one in names])
        for one in names:
            taken[one] += BATCH
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # what is above the block of rmu moves on by its momentum
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for n, gradient in neox_weights(ours["gradient"]).items() if step == 6 else ():
            assert torch.allclose(unpad(n, gradient).double(), gradients[n], rtol=1e-5, atol=1e-5 * float(norm)), n
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step) * (0.5 if forgets else 1.0)
        optimizer.step()
        assert ours["lr"][step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        assert ours["loss"][step] == pytest.approx(loss.item(), rel=1e-5), step
        assert ours["grad_norm"][step] == pytest.approx(norm.item(), rel=1e-4), step
        assert ours["metrics"][step] == pytest.approx(metrics, rel=1e-5), step


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ascent", Layout(pp=2, tp=2, micro=1)),
        ("difference", Layout(dp=2, tp=2, zero=1)),
        ("difference", Layout(pp=2, dp=2, micro=4)),
        ("npo", Layout(pp=2, tp=2, micro=2, sequence_parallel=True)),
        ("npo", Layout(dp=2, zero=3)),
        ("simnpo", Layout(dp=2, tp=2, micro=1, engine="native")),
        ("rmu", Layout(pp=2, tp=2, micro=2, sequence_parallel=True)),
        ("rmu", Layout(pp=2, dp=2, micro=4)),
        ("rmu", Layout(dp=2, zero=3, micro=1)),
        ("rmu", Layout(dp=2, tp=2, micro=4, engine="native")),
    ],
    ids=str,
)
def test_the_curve_does_not_depend_on_the_layout(name: str, layout: Layout) -> None:
    ours, other = one_rank(name), one_rank(name, 1)
    noise = max(abs(a - b) / b for a, b in zip(other["grad_norm"], ours["grad_norm"], strict=True))
    keys = {**NEOX, "num_kv_heads": 4, **ADAM, **OBJECTIVES[name]}
    for curve in run_distributed(steps_of, layout.world, keys, layout, timeout=120):
        assert curve["loss"] == pytest.approx(ours["loss"], rel=1e-5)
        assert curve["grad_norm"] == pytest.approx(ours["grad_norm"], rel=max(1e-5, 10 * noise))
        for step, metrics in enumerate(curve["metrics"]):
            assert metrics == pytest.approx(ours["metrics"][step], rel=1e-5)


# -- whole runs ---------------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {"train_iters": 8, "checkpoint_factor": 3, "ga_mode": "interleaved", "ga_interleave_ratio": 2}
BURSTS: dict[str, Any] = {
    "train_iters": 8,
    "checkpoint_factor": 3,
    "ga_mode": "interval",
    "ga_interval": 2,
    "ga_iters": 2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        "data_path": corpus(folder / "train", 7),
        "ga_dataset": corpus(folder / "forget", 8),
        "gd_retain_dataset": corpus(folder / "retain", 9),
    }


@pytest.fixture(scope="module")
def difference(tmp_path_factory: pytest.TempPathFactory, data: dict[str, str]) -> tuple[Report, Path]:
    """A run of gradient difference, and its folder, with a checkpoint right before a step that forgets."""
    folder = tmp_path_factory.mktemp("difference") / "save"
    (report,) = run({**WHOLE, **data, "gd_mode": True, "save": str(folder)})
    assert not report.error
    return report, folder


def test_a_run_reads_and_logs_each_source(difference: tuple[Report, Path]) -> None:
    report, folder = difference
    assert [len(step) for step in report.tokens] == [8, 8, 8, 16, 8, 8, 16, 8]
    read = [sample for step in report.tokens for sample in step]
    assert len(set(read)) == len(read)  # within the first pass over each source
    logged = [metrics for _, metrics in report.logged]
    forgets = [3, 6]
    for step, metrics in enumerate(logged):
        assert ("train/lm_loss" in metrics) == (step not in forgets)
        assert {"train/gd_forget_loss", "train/gd_retain_loss", "train/gd_combined_loss"} <= set(metrics) or (
            step not in forgets and not any("_loss" in name for name in metrics if "gd_" in name)
        )
        assert metrics["train/batch_type"] == (2 if step in forgets else 0)
        assert metrics["train/gd_iterations_total"] == sum(k <= step for k in forgets)
    assert logged[-1]["train/tokens"] == 16 * 8 * 10
    combined = 40.0 * logged[3]["train/gd_retain_loss"] - logged[3]["train/gd_forget_loss"]
    assert logged[3]["train/gd_combined_loss"] == pytest.approx(combined, rel=1e-5) == report.loss[3]
    saved = open_checkpoint(folder / "global_step6").callbacks
    assert saved["DataOrder"]["taken"] == {"train": 40, "forget": 8, "retain": 8}
    # What was lowered in step 3 is far above the first loss, and says nothing about the checkpoint before it.
    assert report.loss[3] > 10 * report.loss[0] and saved["Checkpointer"]["good"] == 3


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, dp=2, micro=4)], ids=lambda x: x.name)
def test_a_stopped_run_goes_on_in_every_source(
    tmp_path: Path, data: dict[str, str], difference: tuple[Report, Path], layout: Layout
) -> None:
    whole, folder = difference
    again = {"load": str(folder), "iteration": 3, "save": str(tmp_path / "again")}
    reports = run({**WHOLE, **data, "gd_mode": True, **again}, layout)
    for report in reports:
        assert not report.error and report.lr == whole.lr[3:]
        assert report.loss == pytest.approx(whole.loss[3:], rel=1e-5)
        if layout.world == 1:
            assert (report.loss, report.tokens, report.state) == (whole.loss[3:], whole.tokens[3:], whole.state)
    assert reports[0].logged[-1][1]["train/gd_iterations_total"] == 2


def test_a_threshold_leaves_steps_out_and_changes_no_other(tmp_path: Path, data: dict[str, str]) -> None:
    """Below it nothing is different from a run without it; above it whole bursts have no update, also where a run
    stopped inside one."""
    plain, high = (run({**BURSTS, **data, **more})[0] for more in ({}, {"ga_loss_threshold": 100.0}))
    assert (high.loss, high.state) == (plain.loss, plain.state) and not any(high.skipped)
    stops = {"ga_loss_threshold": 1.0, "ga_threshold_check_mode": "per_burst"}
    (low,) = run({**BURSTS, **data, **stops, "save": str(tmp_path / "save")})
    assert [k for k, skipped in enumerate(low.skipped) if skipped] == [2, 3, 6, 7]
    assert [len(step) for step in low.tokens] == [8] * 8 and low.tokens == plain.tokens
    last = low.logged[-1][1]
    assert (last["train/ga_steps_skipped_total"], last["train/ga_skip_rate"]) == (4, 1.0)
    again = {"load": str(tmp_path / "save"), "iteration": 3, "save": str(tmp_path / "again")}
    # The rest of the burst is left out, whatever a comparison would say by now.
    (rest,) = run({**BURSTS, **data, **stops, **again, "ga_loss_threshold": 100.0})
    assert [k + 3 for k, skipped in enumerate(rest.skipped) if skipped] == [3]
    assert rest.logged[-1][1]["train/ga_steps_performed_total"] == 2


def test_a_threshold_measures_nothing_where_a_step_is_skipped(data: dict[str, str]) -> None:
    """Step 2, the first of a burst, is skipped, and counts neither as forgotten nor as left out by the threshold."""
    keys = {**BURSTS, "train_iters": 4, "skip_steps": [[2, 3]], "ga_loss_threshold": 100.0}
    (report,) = run({**keys, **data})
    assert not report.error and report.skipped == [False, False, True, False]
    last = report.logged[-1][1]
    assert (last["train/ga_steps_performed_total"], last["train/ga_steps_skipped_total"]) == (1, 0)


def test_npo_compares_with_the_model_that_the_run_began_with(tmp_path: Path, data: dict[str, str]) -> None:
    """Of the forget data alone; while nothing has changed it is 2 ln 2 / beta, wherever the run stopped before."""
    still = {"optimizer": {"type": "Adam", "params": {"lr": 1e-12}}, "min_lr": 0.0, "weight_decay": 0.0}
    keys = {**WHOLE, **data, "ga_loss": "npo", "reference_path": str(tmp_path), "eval_iters": 1}
    (report,) = run({**keys, **still})
    assert not report.error
    assert [report.loss[step] for step in (3, 6)] == pytest.approx([13.862944] * 2, rel=1e-5)
    (folder,) = tmp_path.glob("reference-*")
    assert sum(path.stat().st_size // 8 for path in folder.glob("*.keys")) == 16
    assert {split for _, split, _ in report.evaluated} == {"validation", "test"}
    whole = run({**keys, "save": str(tmp_path / "whole")})[0]
    again = {"load": str(tmp_path / "whole"), "iteration": 6, "save": str(tmp_path / "again")}
    for rest in run({**keys, **again}, Layout(pp=2, tp=2)):
        assert not rest.error and rest.loss == pytest.approx(whole.loss[6:], rel=1e-5)
    assert abs(whole.loss[6] - 13.862944) > 1e-3


RMU: dict[str, Any] = {
    "num_layers": 4,
    "train_iters": 8,
    "checkpoint_factor": 6,
    "eval_iters": 1,
    "ga_mode": "interleaved",
    "ga_interleave_ratio": 0,  # every step forgets
    "gd_mode": True,
    "gd_retain_weight": 10.0,
    "ga_loss": "rmu",
    "ga_rmu_layer": 2,
    "ga_rmu_coefficient": 4.0,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
    "init_method_std": 0.1,
    "warmup": 0.0,
    "gradient_clipping": 1.0,
}


def test_rmu_moves_what_is_forgotten_and_holds_the_rest(tmp_path: Path, data: dict[str, str]) -> None:
    """In the block and the two before alone; a run that goes on, at another layout too, compares with the weights that
    it began with."""
    keys = {**RMU, **data, "ga_dataset": corpus(tmp_path / "capitals", 8, ord("A"))}
    (whole,) = run({**keys, "save": str(tmp_path / "whole")})
    assert not whole.error and not any(whole.skipped) and [len(step) for step in whole.tokens] == [16] * 8
    away, held = (
        [metrics[f"train/rmu_{name}_distance"] for _, metrics in whole.logged] for name in ("forget", "retain")
    )
    assert held[0] < 1e-12 and away[-1] < 0.2 * away[0] and max(held) < 0.05 * away[0]
    assert {split for _, split, _ in whole.evaluated} == {"validation", "test"}
    (short,) = run({**keys, "train_iters": 1})
    changed = {name.split(".")[0] for name, value in whole.state.items() if short.state[name] != value}
    assert changed == {"2", "3", "4"}
    again = {"load": str(tmp_path / "whole"), "iteration": 6}
    for layout in (Layout(), Layout(pp=2, dp=2, micro=4)):
        for report in run({**keys, **again, "save": str(tmp_path / layout.name)}, layout):
            assert not report.error and report.loss == pytest.approx(whole.loss[6:], rel=1e-5)
            if layout.world == 1:
                assert (report.loss, report.state) == (whole.loss[6:], whole.state)
    (lost,) = run({**keys, **again, "save": str(tmp_path / "lost"), "no_load_optim": True})
    assert lost.exit_code == 2 and lost.error.startswith("no_load_optim: ")
    idle = run({**keys, "ga_rmu_layer": 0}, Layout(pp=2))[0]
    assert idle.exit_code == 2 and "ga_rmu_layers" in idle.error


def test_blocks_that_rmu_has_trained_stay_so(tmp_path: Path) -> None:
    keys = {"num_layers": 4, "data_path": "x", "ga_dataset": "x", "gd_retain_dataset": "x", "ga_interleave_ratio": 0}
    keys |= {"ga_mode": "interleaved", "gd_mode": True, "ga_loss": "rmu"}
    saved = FrozenStates(derived(tmp_path, **keys, ga_rmu_layer=2)).state_dict()
    for layers in ([], [0, 1, 2], [3, 2, 1, 0]):
        FrozenStates(derived(tmp_path, **keys, ga_rmu_layer=2, ga_rmu_layers=layers)).load_state_dict(saved)
    with pytest.raises(UserError, match="^ga_rmu_layers: blocks 0 were trained so far"):
        FrozenStates(derived(tmp_path, **keys, ga_rmu_layer=3)).load_state_dict(saved)
    whole = FrozenStates(derived(tmp_path, **keys, ga_rmu_layer=2, ga_rmu_layers=[])).state_dict()
    with pytest.raises(UserError, match="^ga_rmu_layers: blocks 3 were trained so far"):
        FrozenStates(derived(tmp_path, **keys, ga_rmu_layer=2)).load_state_dict(whole)
