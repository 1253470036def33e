"""`deterministic: layout`: weights, losses and gradient norms have the same bits at every data-parallel layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.training.native.fixed_point import UNITS, FixedPointSums, from_fixed, to_fixed
from tests.distributed import run_distributed
from tests.training.tiny import BATCH, LLAMA, NEOX, VOCAB, Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

STEPS = 6
EXACT = {"deterministic": "layout"}
MODELS = {"neox": {**NEOX, **EXACT}, "llama": {**LLAMA, **EXACT}, "bf16": {**LLAMA, **EXACT, "precision": "bfloat16"}}


def bits(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> Any:
    """Losses and norms of some steps, a sum that is evaluated, and the master weights and moments after them."""
    engine, args, learning_rate = build(rank, keys, layout)
    outs = [engine.train_batch(step_batch(s, args, engine.state), learning_rate(s)) for s in range(STEPS)]
    numbers = [(float(out.loss), float(out.grad_norm)) for out in outs]
    numbers.append(tuple(engine.eval_batch(step_batch(STEPS, args, engine.state)).sums.tolist()))
    return numbers, {(name, key): value for name, state in whole_state(engine).items() for key, value in state.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout", [Layout(micro=4), Layout(dp=2, micro=2, zero=1), Layout(dp=4, micro=1, zero=2)], ids=str
)
def test_bits_are_those_of_one_rank(model: str, layout: Layout) -> None:
    numbers, state = run_distributed(bits, 1, MODELS[model], Layout(micro=8))[0]
    for other, its_state in run_distributed(bits, layout.world, MODELS[model], layout):
        assert other == numbers
        for key, value in state.items():
            assert torch.equal(its_state[key], value), key


@pytest.mark.full
def test_at_two_tensor_parallel_ranks_the_bits_are_those_of_one_copy() -> None:
    numbers, _ = run_distributed(bits, 2, MODELS["neox"], Layout(tp=2, micro=8))[0]
    assert all(other == numbers for other, _ in run_distributed(bits, 4, MODELS["neox"], Layout(tp=2, dp=2, micro=1)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine": "deepspeed"}, "deterministic: layout needs engine: native"),
        ({"hidden_dropout": 0.1}, "set hidden_dropout: 0"),
        ({"lora_r": 4, "lora_dropout": 0.1}, "set lora_dropout: 0"),
        ({"train_impl": "grpo"}, "completions of train_impl: grpo .* set deterministic: true"),
        ({"num_gpus": 2, "pipe_parallel_size": 2}, "native is one stage"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    (tmp_path / "run.yml").write_text(yaml.safe_dump({**NEOX, **EXACT, **changed}))
    with pytest.raises(UserError, match=message):
        derive(NeoXArgs.from_files([str(tmp_path / "run.yml")]), Facts(vocab_size=VOCAB, num_devices=2))


def test_the_global_batch_stays_when_samples_are_computed_one_by_one() -> None:
    keys = {**NEOX, **EXACT, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    del keys["train_batch_size"]
    args = derive(NeoXArgs.from_saved(keys), Facts(vocab_size=VOCAB, num_devices=2))
    training = args.training
    assert (training.train_batch_size, training.train_micro_batch_size_per_gpu) == (12, 1)
    assert training.gradient_accumulation_steps == 6 and args.optimizer.engine == "native"
    assert derive(args, Facts(vocab_size=VOCAB, num_devices=2)).to_dict() == args.to_dict()


def test_without_it_the_bits_differ() -> None:
    """Or the test above would show nothing."""
    keys = {**LLAMA, "engine": "native"}
    one, other = (
        run_distributed(bits, x.world, keys, x)[0]
        for x in (Layout(micro=8, engine="native"), Layout(dp=4, micro=1, engine="native"))
    )
    assert one[0] != other[0]
    assert [x for pair in one[0] for x in pair] == pytest.approx([x for pair in other[0] for x in pair], rel=1e-5)


def test_sums_do_not_depend_on_the_order_and_are_right() -> None:
    """Against `math.fsum`, which rounds once."""
    terms = (
        torch.randn(64, 100, generator=torch.Generator().manual_seed(1))
        * 10.0 ** torch.arange(-4, 4).repeat(8)[:, None]
    )
    sums = FixedPointSums(torch.zeros(1))
    sums.terms = 64

    def added(order: list[int]) -> torch.Tensor:
        total = torch.empty(100, dtype=torch.int64)
        for position, index in enumerate(order):
            sums.add(total, terms[index] / 100, position == 0)
        return from_fixed(total)

    forwards, backwards = added(list(range(64))), added(list(range(63, -1, -1)))
    assert torch.equal(forwards, backwards) and not sums.refused
    exact = [math.fsum((terms[:, column] / 100).tolist()) for column in range(100)]
    torch.testing.assert_close(forwards.double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-7, atol=64 / UNITS)
    pieces = [forwards[:37], forwards[37:]]
    norm = sums.norm(pieces, ParallelState.single("cpu"))
    assert torch.equal(norm, sums.norm(pieces[::-1], ParallelState.single("cpu")))
    assert float(norm) == pytest.approx(math.sqrt(math.fsum(float(x) ** 2 for x in forwards)), rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 129.0])
def test_what_does_not_fit_makes_the_norm_infinite_until_the_next_step(bad: float) -> None:
    """129 * 64 terms are more than a sum holds."""
    sums, total = FixedPointSums(torch.zeros(1)), torch.zeros(2, dtype=torch.int64)
    sums.terms = 64
    sums.add(total, torch.tensor([1.0, bad]), first=True)
    assert math.isinf(sums.norm([torch.ones(2)], ParallelState.single("cpu")))
    sums.clear()
    assert float(sums.norm([torch.tensor([3.0, 4.0])], ParallelState.single("cpu"))) == 5.0
    assert float(sums.norm([torch.zeros(2)], ParallelState.single("cpu"))) == 0.0
    assert torch.equal(from_fixed(to_fixed(torch.tensor([0.1, -3e-5]))), torch.tensor([0.1, -3e-5]))


def test_metrics_of_long_answers_fit_into_their_sums() -> None:
    """Log-probabilities of answers, in nats, which a loss of them does not reach; what does not fit is no number."""
    sums = FixedPointSums(torch.zeros(3))
    sums.terms = 2
    for means in ([2.5, -9000.25, 1e6], [0.25, -20000.5, 1e6]):
        sums.add_means(torch.tensor(means))
    assert sums.means(lambda x: x).tolist() == [2.75, -29000.75, 2e6]
    sums.add_means(torch.tensor([9000.0, 1e10, math.nan]))
    assert sums.means(lambda x: x).isnan().all()


def reported(rank: int, world: int, layout: Layout) -> list[tuple[float, int]]:
    """(Loss, whether the step was skipped) of steps in which no rank, then the last one, has a weight that is NaN."""
    engine, args, _ = build(rank, MODELS["neox"], layout)
    found = []
    for step, bad in enumerate((False, True)):
        if bad and rank == world - 1:
            with torch.no_grad():
                next(iter(engine.params().values())).fill_(torch.nan)
        out = engine.train_batch(step_batch(step, args, engine.state), 1e-3)
        found.append((float(out.loss), int(out.skipped)))
    return found


def test_a_loss_that_is_not_finite_is_reported_as_such() -> None:
    for found in run_distributed(reported, 2, Layout(dp=2)):
        assert math.isfinite(found[0][0]) and found[0][1] == 0
        assert math.isnan(found[1][0]) and found[1][1] == 1


def train_steps(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> list[int]:
    engine, args, _ = build(rank, keys, layout)
    engine.train_batch(step_batch(0, args, engine.state), 1e-3)
    return [engine.fixed_point.terms, engine.micro_batches]


def test_a_sum_has_room_for_the_batch_of_its_own_step() -> None:
    assert run_distributed(train_steps, 2, MODELS["neox"], Layout(dp=2))[0] == [BATCH, BATCH // 2]
