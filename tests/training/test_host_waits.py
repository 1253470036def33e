"""A step reads nothing from the device: the host may be one step ahead of it. What is left is counted here."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from deepspeed.utils.timer import SynchronizedWallClockTimer

from megatron.run import train as run
from megatron.training.callback import Callback
from megatron.training.trainer import Trainer
from tests.distributed import run_distributed
from tests.host_waits import HostWaits
from tests.training.models import BALANCED as EXPERTS
from tests.training.models import MAMBA_AND_ATTENTION as MAMBA
from tests.training.runs import corpus, process_of
from tests.training.tiny import BATCH, LLAMA, Layout, build, step_batch

pytestmark = pytest.mark.cpu

STEPS = 3
LAYERS = LLAMA["num_layers"]
FP32, BF16 = {"precision": "fp32"}, {"precision": "bfloat16"}
PACKED = {"intra_document_masking": True}


class Case(NamedTuple):
    """`waits`: in a step, for the optimizer; `micro_batch`: in each micro-batch."""

    keys: dict[str, Any]
    layout: Layout
    waits: dict[str, int] = {}
    micro_batch: dict[str, int] = {}


# Where torch's grouped product does not do it: never on a CPU, seldom on a GPU.
ONE_BY_ONE = {"grouped_linear.py:host": LAYERS}
CASES = {
    **{
        f"{precision}, {engine}, {ranks} ranks": Case(
            {"precision": precision}, Layout(dp=ranks, zero=0 if precision == "fp32" else 1, engine=engine)
        )
        for precision in ("fp32", "bfloat16")
        for engine in ("deepspeed", "native")
        for ranks in (1, 2)
    },
    "pipeline": Case(BF16, Layout(pp=2, zero=1)),
    "outliers": Case({**BF16, "skip_outliers": {"window": 4}}, Layout()),
    "muon": Case({**BF16, "optimizer": {"type": "Muon"}}, Layout(tp=2, engine="native")),
    "muon, in pieces": Case({**BF16, "optimizer": {"type": "Muon"}}, Layout(dp=2, zero=1)),
    "average and z-loss": Case({**BF16, "ema_decay": 0.9, "z_loss_weight": 0.1}, Layout(dp=2, zero=1)),
    "packed": Case({**BF16, **PACKED}, Layout(dp=2, zero=1)),
    "packed, native": Case({**BF16, **PACKED}, Layout(engine="native")),
    "packed, pipeline": Case({**BF16, **PACKED}, Layout(pp=2, zero=1)),
    "packed, sequence parallel": Case({**BF16, **PACKED}, Layout(tp=2, sequence_parallel=True, zero=1)),
    "packed, mamba": Case({**BF16, **PACKED, **MAMBA}, Layout()),
    "mamba, one group on two ranks": Case({**BF16, **MAMBA}, Layout(tp=2, zero=1)),
    "experts": Case({**BF16, **EXPERTS, **PACKED, "moe_capacity_factor": 1.0}, Layout(), {}, ONE_BY_ONE),
    "experts on two ranks": Case(
        {**BF16, **EXPERTS}, Layout(dp=2, zero=1, ep=2), {}, {**ONE_BY_ONE, "exchange.py:plan": LAYERS}
    ),
    "sgd": Case(
        {**BF16, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}, Layout(), {"scaled_step.py:scaled_step": 1}
    ),
    "zero 1 in fp32": Case(FP32, Layout(dp=2, zero=1)),
    "zero 2": Case(BF16, Layout(dp=2, zero=2)),
    # It asks whether a norm is finite: the one that it is given is in the host's memory.
    "zero 3": Case(BF16, Layout(dp=2, zero=3), {"engine_zero.py:step": 1}),
}


def count_waits(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[list[Counter[str]], Counter[str]]:
    """Of each step, and of an evaluation."""
    engine, args, lr = build(rank, keys, layout)
    engine.votes = lambda: (rank == 0, False)
    found, norms = [], []
    for step in range(STEPS):
        with HostWaits() as waits:
            out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        assert out.votes == (True, False)
        found.append(waits.found)
        norms.append(float(out.grad_norm))
    assert max(norms) > keys["gradient_clipping"]
    with HostWaits() as waits:
        engine.eval_batch(step_batch(99, args, engine.state))
    return found, waits.found


@pytest.mark.parametrize("name", CASES)
def test_what_the_host_waits_for_in_a_step(name: str) -> None:
    keys, layout, in_update, in_micro_batch = CASES[name]
    micro_batches = BATCH // layout.dp // layout.micro
    passes = {place: times * micro_batches for place, times in in_micro_batch.items()}
    for steps, evaluation in run_distributed(count_waits, layout.world, {**LLAMA, **keys}, layout):
        # The first step makes the optimizer's state. Of what is in the host's memory: the sums of all ranks.
        for waits in steps[1:]:
            waits.pop("cross_entropy.py:_check_targets", None)  # a CPU alone is asked
            assert waits == {**passes, **in_update, "engine_step.py:_counts": 1}
        evaluation.pop("cross_entropy.py:_check_targets", None)
        assert evaluation == {**passes, "engine_step.py:_counts": 1}


def compare_bounds(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> list[list[float]]:
    """The curve with the bounds of documents that come with the batch, and where the model finds them itself."""
    curves = []
    for known in (True, False):
        engine, args, lr = build(rank, keys, layout)
        curve = []
        for step in range(2):
            batch = step_batch(step, args, engine.state)
            assert batch.bounds is not None
            out = engine.train_batch(batch if known else dataclasses.replace(batch, bounds=None), lr(step))
            curve += [float(out.loss), float(out.grad_norm)]
        total = engine.eval_batch(batch if known else dataclasses.replace(batch, bounds=None)).sums
        curves.append([*curve, float(total)])
    return curves


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp=2, engine="native"), Layout(pp=2, zero=1), Layout(tp=2, sequence_parallel=True)],
    ids=lambda layout: layout.name,
)
def test_bounds_from_the_loader_change_no_loss(layout: Layout) -> None:
    for known, asked in run_distributed(compare_bounds, layout.world, {**LLAMA, **FP32, **PACKED}, layout):
        assert known == asked


def count_timed(rank: int, world: int, layout: Layout) -> list[int]:
    """How many measurements DeepSpeed's timers hold after each step; on a GPU each is two events."""
    engine, args, lr = build(rank, LLAMA, layout)
    found = []
    for step in range(STEPS):
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
        timers = [one for one in gc.get_objects() if type(one) is SynchronizedWallClockTimer.Timer]
        found.append(sum(len(timer.event_timers) for timer in timers))
    return found


def test_nothing_is_kept_of_a_pipeline_s_steps() -> None:
    for counts in run_distributed(count_timed, 2, Layout(pp=2)):
        assert len(set(counts)) == 1


class Watch(Callback):
    """Counts from the third step to the last, callbacks included, as on an accelerator."""

    def __init__(self, waits: HostWaits) -> None:
        self.waits = waits

    def start(self, trainer: Trainer) -> None:
        trainer.late = True

    def before_step(self, trainer: Trainer) -> None:
        if trainer.step == 2:
            self.waits.__enter__()

    def end(self, trainer: Trainer) -> None:
        self.waits.__exit__(None, None, None)


def count_run(rank: int, world: int, keys: dict[str, Any]) -> Counter[str]:
    process, waits, build_callbacks = process_of(rank, keys, Layout()), HostWaits(), run.build_callbacks
    with mock.patch.object(run, "build_callbacks", lambda context: [Watch(waits), *build_callbacks(context)]):
        run.train(process)
    return waits.found


def test_a_log_of_everything_is_read_at_once(tmp_path: Path) -> None:
    """Norms of all parameters and gradients, the load of experts, losses: one copy per log, and one per step."""
    logs = {"log_interval": 2, "log_grad_norm": True, "log_param_norm": True}
    logs |= {"skip_outliers": True, "on_spike": "warn", "log_gradient_noise_scale": True, "monitor_interval": 2}
    logs |= {"gradient_noise_scale_n_batches": 2}
    keys = {**BF16, **EXPERTS, **logs, "moe_bias_balancing_rate": 0.01, "data_path": corpus(tmp_path)}
    (waits,) = run_distributed(count_run, 1, keys)
    steps = 4
    waits.pop("cross_entropy.py:_check_targets")
    waits.pop("grouped_linear.py:host")  # `ONE_BY_ONE`
    waits.pop("loss_spikes.py:settled")  # of numbers that are in the host's memory by then
    # Each step and each log is read with the next step, and the last of both at the end as well.
    assert waits == {"engine_step.py:_counts": steps, "late.py:read": steps + 1 + steps // 2 + 1}
