"""Samples that are cut into short rows (`seq_length_ramp`), beside samples that were cut by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.batch import StepBatch
from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.sample import Sample
from megatron.neox_arguments.batch_plan import BatchPlan
from tests.distributed import run_distributed
from tests.training.models import MAMBA_AND_ATTENTION
from tests.training.tiny import LLAMA, NEOX, SEQUENCE, VOCAB, Layout, Samples, build, step_batch, tiny_args

pytestmark = pytest.mark.cpu

# Rows of 4 in steps 0 and 1, of 8 in steps 2 and 3, then whole samples; a larger batch from step 3 on.
RAMP: dict[str, Any] = {"seq_length_ramp": {"start": 4, "steps": 4}, "batch_size_schedule": [[0, 4], [3, 8]]}
LENGTHS, SIZES = [4, 4, 8, 8, 16, 16], [4, 4, 4, 8, 8, 8]
MODELS = {
    "neox": NEOX,
    "documents": {**LLAMA, "intra_document_masking": True},
    "mamba": {**LLAMA, **MAMBA_AND_ATTENTION},
}


class Pieces:
    """The samples of a run, each cut by hand."""

    def __init__(self, length: int) -> None:
        self.length, self.per_sample = length, SEQUENCE // length

    def __getitem__(self, number: int) -> Sample:
        whole, piece = Samples()[number // self.per_sample], number % self.per_sample
        begin, end = piece * self.length, (piece + 1) * self.length + 1
        assert whole.starts is not None and whole.labels is not None
        starts = [start - begin for start in whole.starts if begin <= start < end]
        return Sample(whole.tokens[begin:end], starts=np.array(starts, int), labels=whole.labels[begin:end])


def by_hand(step: int, args: Any, state: Any) -> StepBatch:
    """A step of one rank."""
    micro, length = args.training.train_micro_batch_size_per_gpu, LENGTHS[step]
    rules = CollateRules(length, intra_document_masking=args.model.intra_document_masking, vocab_size=VOCAB)
    rows = SEQUENCE // length
    loader = StepLoader(
        Pieces(length),  # type: ignore[arg-type]
        micro_batch=micro * rows,
        gas=SIZES[step] // micro,
        rules=rules,
    )
    return loader.read(sum(SIZES[:step]) * rows, step)


def curve(rank: int, world: int, keys: dict[str, Any], layout: Layout, read: Any) -> dict[str, list[float]]:
    engine, args, lr = build(rank, keys, layout)
    outs = [engine.train_batch(read(step, args, engine.state), lr(step)) for step in range(len(SIZES))]
    evaluated = engine.eval_batch(step_batch(99, args, engine.state))
    return {
        "loss": [float(out.loss) for out in outs] + [evaluated.loss],
        "grad_norm": [float(out.grad_norm) for out in outs],
    }


@pytest.mark.parametrize("model", ["neox", "documents"])
@pytest.mark.parametrize("micro", [1, 2])
def test_rows_are_those_cut_by_hand(model: str, micro: int) -> None:
    args = tiny_args({**MODELS[model], **RAMP}, Layout(micro=micro))
    state: Any = SimpleNamespace(dp_rank=0, dp_size=1)
    for step in range(len(SIZES)):
        ours, theirs = step_batch(step, args, state), by_hand(step, args, state)
        assert ours.tokens.shape == (SIZES[step] // micro, micro * SEQUENCE // LENGTHS[step], LENGTHS[step])
        assert ours.tensors().keys() == theirs.tensors().keys() and ours.trained == theirs.trained
        for name, tensor in ours.tensors().items():
            assert torch.equal(tensor, theirs.tensors()[name]), (name, step)
        assert ours.longest == theirs.longest


def test_padding_stays_without_loss() -> None:
    """Whole documents with padding behind them."""
    rules = CollateRules(12, intra_document_masking=True)
    dataset: Any = [Sample(np.arange(1, 14), starts=np.array([0, 5]), length=7)]
    plan = BatchPlan(((0, 1),), 12, lengths=((0, 4),))
    (whole,) = StepLoader(dataset, micro_batch=1, gas=1, rules=rules).steps()
    (short,) = StepLoader(dataset, micro_batch=1, gas=1, rules=rules, plan=plan).steps()
    assert short.mask.flatten().tolist() == whole.mask.flatten().tolist() == [1, 1, 1, 1, 0, 1] + [0] * 6
    assert short.padding == whole.padding == 5 and short.trained == 5
    assert short.positions.flatten().tolist() == [0, 1, 2, 3, 0, 0, 1, 0, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("documents", Layout(dp=2, zero=1)),
        ("neox", Layout(pp=2, tp=2, sequence_parallel=True)),
        ("documents", Layout(dp=2, engine="native", micro=1)),
        pytest.param("documents", Layout(pp=2, dp=2), marks=pytest.mark.slow),
        pytest.param("mamba", Layout(tp=2), marks=pytest.mark.slow),
        pytest.param("neox", Layout(dp=2, zero=3), marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_the_curve_is_that_of_rows_cut_by_hand(model: str, layout: Layout) -> None:
    keys = {**MODELS[model], **RAMP}
    (cut,) = run_distributed(curve, 1, keys, Layout(micro=4), by_hand)
    for ours in run_distributed(curve, layout.world, keys, layout, step_batch):
        assert ours["loss"] == pytest.approx(cut["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(cut["grad_norm"], rel=1e-4)
