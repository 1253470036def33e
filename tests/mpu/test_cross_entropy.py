"""The fused, vocabulary-parallel cross entropy against plain torch: values, gradients, dtypes, memory, work done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.errors import UserError
from megatron.mpu import cross_entropy
from megatron.mpu.cross_entropy import Projection, ZLoss, linear_cross_entropy, weighted_linear_cross_entropy
from megatron.mpu.product_sums import add_product
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import run_distributed
from tests.product_sums import Shapes, summing

pytestmark = pytest.mark.cpu

VOCAB, HIDDEN, TOKENS = 67, 5, 24
SINGLE = ParallelState.single()
PLAIN = Projection(VOCAB, SINGLE)


def padded_vocab(tp_size: int, divisor: int = 8) -> int:
    return -(-VOCAB // (divisor * tp_size)) * divisor * tp_size


def case(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [t, h], weight [VOCAB, h], targets [t] (first and last row of every shard), gradient of the losses [t]."""
    generator = torch.Generator().manual_seed(7)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[:8] = torch.tensor([0, 23, 24, 39, 40, 47, 48, 66])
    grad = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    grad[3::5] = 0.0  # masked tokens
    return hidden, weight, targets, grad


def expected(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, ...]:
    """(losses, gradients of hidden, weight and, if there is one, bias) in fp64."""
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = inputs[0] @ inputs[1].T + sum(inputs[2:])
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses, inputs, grad)


def some_bias(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(8), dtype=torch.float64).to(dtype)


def pad(weight: Tensor, rows: int) -> Tensor:
    """Padding rows that would ruin every loss if they took part."""
    return torch.cat([weight, torch.full((rows - weight.shape[0], *weight.shape[1:]), 50.0, dtype=weight.dtype)])


def both_ways(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad: Tensor,
    state: ParallelState,
    chunk: int,
    compiled: bool = False,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> list[tuple[Tensor, ...]]:
    """(losses, gradients of hidden, weight and bias) of the per-token and of the weighted function."""
    inputs = [x.detach().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    hidden, weight = inputs[:2]
    options = (Projection(VOCAB, state, chunk, compiled, cap), inputs[2] if bias is not None else None)
    losses = linear_cross_entropy(hidden, weight, targets, *options)
    results = [(losses.detach(), *torch.autograd.grad(losses, inputs, grad.to(losses.dtype)))]
    total, losses = weighted_linear_cross_entropy(hidden, weight, targets, grad, *options)
    torch.testing.assert_close(total.detach(), (losses * grad.to(losses.dtype)).sum())
    assert not losses.requires_grad
    results.append((losses, *(g / 3 for g in torch.autograd.grad(3 * total, inputs))))
    return results


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Also the functions that are compiled on a GPU; here without the compiler."""
    monkeypatch.setattr(cross_entropy, "kernel", lambda function: function)
    return request.param


@pytest.mark.parametrize("chunk", [1, 7, 24, 512])
def test_one_rank(chunk: int, compiled: bool) -> None:
    hidden, weight, targets, grad = case()
    losses, grad_hidden, grad_weight = expected(hidden, weight, targets, grad)
    rows = padded_vocab(1)
    for got in both_ways(hidden, pad(weight, rows), targets, grad, SINGLE, chunk, compiled):
        torch.testing.assert_close(got, (losses, grad_hidden, pad0(grad_weight, rows)), rtol=1e-9, atol=1e-12)


def pad0(weight: Tensor, rows: int) -> Tensor:
    return torch.cat([weight, weight.new_zeros(rows - weight.shape[0], *weight.shape[1:])])


FORMS = [{"bias": some_bias()}, {"cap": 1.5}, {"bias": some_bias(), "cap": 1.5}]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(form))
@pytest.mark.parametrize("chunk", [7, 512])
def test_bias_and_cap(chunk: int, compiled: bool, form: dict[str, Any]) -> None:
    hidden, weight, targets, grad = case()
    losses, *gradients = expected(hidden, weight, targets, grad, **form)
    rows = padded_vocab(1)
    wanted = (losses, gradients[0], *(pad0(gradient, rows) for gradient in gradients[1:]))
    padded = {**form, **({"bias": pad(form["bias"], rows)} if "bias" in form else {})}
    for got in both_ways(hidden, pad(weight, rows), targets, grad, SINGLE, chunk, compiled, **padded):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_a_cap_bounds_what_would_overflow() -> None:
    """Logits of 10^4 lose at most 2 · cap + ln(vocabulary), and their gradient is that of the flat tanh."""
    hidden, weight, targets, grad = case(scale=1e4)
    for losses, *gradients in both_ways(hidden, weight, targets, grad, SINGLE, 7, cap=3.0):
        assert losses.max() < 6 + 4.3
        assert all(gradient.isfinite().all() for gradient in gradients)


def on_every_rank(rank: int, world_size: int, sequence_parallel: bool) -> None:
    topology = Topology({"pipe": 1, "data": 1, "model": world_size})
    state = ParallelState.build(topology, rank, "cpu", sequence_parallel)
    hidden, weight, targets, grad = case()
    losses, grad_hidden, grad_weight = expected(hidden, weight, targets, grad)
    rows = padded_vocab(world_size)
    local = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    tokens = slice(rank * TOKENS // world_size, (rank + 1) * TOKENS // world_size) if sequence_parallel else slice(None)
    wanted = losses, grad_hidden[tokens], pad0(grad_weight, rows)[local]
    cross_entropy.kernel = lambda function: function
    for compiled in (False, True):
        for got in both_ways(hidden[tokens], pad(weight, rows)[local], targets, grad, state, 7, compiled):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    bias = some_bias()
    losses_, *gradients = expected(hidden, weight, targets, grad, bias, 1.5)
    capped = (losses_, gradients[0][tokens], *(pad0(gradient, rows)[local] for gradient in gradients[1:]))
    inputs = (hidden[tokens], pad(weight, rows)[local], targets, grad, state, 7)
    for compiled in (False, True):
        for got in both_ways(*inputs, compiled, pad(bias, rows)[local], 1.5):
            torch.testing.assert_close(got, capped, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks(world_size: int, sequence_parallel: bool) -> None:
    """At 4 ranks the last one holds padding only."""
    run_distributed(on_every_rank, world_size, sequence_parallel)


def test_gradcheck() -> None:
    hidden, weight, targets, _ = case()
    few = slice(0, 6)

    def per_token(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets[few], Projection(VOCAB, SINGLE, 4))

    def capped(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets[few], Projection(VOCAB, SINGLE, 4, softcap=2.0), bias)

    inputs = (hidden[few].clone().requires_grad_(), pad(weight, 72).requires_grad_())
    assert torch.autograd.gradcheck(per_token, inputs)
    assert torch.autograd.gradcheck(capped, (*inputs, pad0(some_bias(), 72).requires_grad_()))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_lower_precision(dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    """Losses fp32 in every dtype; errors of the size of rounding the logits, gradients in the inputs' dtype."""
    hidden, weight, targets, grad = case(dtype)
    wanted = expected(hidden, weight, targets, grad)
    for got in both_ways(hidden, weight, targets, grad.float(), SINGLE, 7, compiled):
        assert (got[0].dtype, got[1].dtype, got[2].dtype) == (torch.float32, dtype, dtype)
        for value, reference in zip(got, wanted):
            error = (value.double() - reference).abs().max() / reference.abs().max()
            assert error < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_lower_precision_of_bias_and_cap(dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    hidden, weight, targets, grad = case(dtype)
    form = {"bias": some_bias(dtype), "cap": 5.0}
    wanted = expected(hidden, weight, targets, grad, **form)
    for got in both_ways(hidden, weight, targets, grad.float(), SINGLE, 7, compiled, **form):
        assert [value.dtype for value in got] == [torch.float32, dtype, dtype, dtype]
        for value, reference in zip(got, wanted, strict=True):
            assert (value.double() - reference).abs().max() / reference.abs().max() < tolerance


def test_chunks_are_summed_in_fp32() -> None:
    """With bf16 weights, 256 chunks of one token each lose nothing that one chunk keeps."""
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.1 * torch.randn(256, 4, generator=generator)).bfloat16()
    weight, targets = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros(256, dtype=torch.int64)
    _, _, reference = expected(hidden, weight, targets, torch.ones(256, dtype=torch.float64))
    losses = linear_cross_entropy(hidden, weight, targets, Projection(3, SINGLE, 1))
    losses.sum().backward()
    assert ((weight.grad.double() - reference).abs().max() / reference.abs().max()) < 5e-3


@pytest.fixture
def sums() -> Iterator[Shapes]:
    with summing() as calls:
        yield calls


def test_chunks_are_added_in_the_product(sums: Shapes, compiled: bool) -> None:
    """Once per chunk, to sums in fp32 of the real vocabulary's rows; of fp32 weights by torch's own product."""
    hidden, weight, targets, grad = case(torch.bfloat16)
    wanted = expected(hidden, weight, targets, grad)
    for got in both_ways(hidden, weight, targets, grad, SINGLE, 7, compiled):
        for value, reference in zip(got, wanted, strict=True):
            assert (value.double() - reference).abs().max() / reference.abs().max() < 2e-2
    chunks = [(VOCAB, min(7, TOKENS - start), HIDDEN) for start in range(0, TOKENS, 7)]
    assert sums == 2 * [(*chunks[0], 0), *chunks[1:]]
    sums.clear()
    both_ways(*(x.float() for x in case(torch.bfloat16)[:2]), targets, grad, SINGLE, 7, compiled)
    assert sums == []


def test_a_product_that_adds_rounds_nothing_but_the_sum(sums: Shapes) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).bfloat16() for size in ((5, 9), (9, 4)))
    exact, rounded, total = torch.ones(5, 4, dtype=torch.float64), torch.ones(5, 4), torch.ones(5, 4)
    for _ in range(20):
        exact += a.double() @ b.double()
        rounded += a.mm(b)
        add_product(total, a, b)
    for kind in (torch.float32, torch.bfloat16):  # the first: whatever memory held
        written = torch.full((5, 4), torch.nan)
        add_product(written, a.to(kind), b.to(kind), first=True)
        torch.testing.assert_close(written, a.float() @ b.float(), rtol=0.01, atol=0.05)
    assert (total - exact).abs().max() < 1e-5 * exact.abs().max() < 0.1 * (rounded - exact).abs().max()


def test_weights_below_the_range_of_fp16_keep_their_gradient() -> None:
    """1 / (number of tokens) underflows fp16; the loss scale that saves it only arrives in backward."""
    hidden, weight, targets, _ = case(torch.float16)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    grad, scale = torch.full((TOKENS,), 1e-8), 2.0**24
    total, _ = weighted_linear_cross_entropy(hidden, weight, targets, grad, PLAIN)
    got = torch.autograd.grad(total * scale, [hidden, weight])
    wanted = expected(hidden, weight, targets, (grad * scale).double())[1:]
    for value, reference in zip(got, wanted):
        assert (value.double() - reference).abs().max() / reference.abs().max() < 3e-3


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets, grad = case(scale=1e4)
    wanted = expected(hidden, weight, targets, grad)
    for got in both_ways(hidden, weight, targets, grad, SINGLE, 7):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_a_micro_batch_without_trained_tokens_adds_zero() -> None:
    """Known fault 8: no division by the number of trained tokens, so no NaN; micro-batches add up to the whole."""
    hidden, weight, targets, grad = case()
    nothing = torch.zeros(TOKENS)
    for losses, grad_hidden, grad_weight in both_ways(hidden, weight, targets, nothing, SINGLE, 7):
        assert losses.isfinite().all() and grad_hidden.eq(0).all() and grad_weight.eq(0).all()
    whole = expected(hidden, weight, targets, grad)[2]
    weight.requires_grad_()
    for part, weights in (
        (slice(0, 4), grad),
        (slice(4, 4 + 8), grad),
        (slice(12, TOKENS), grad),
        (slice(0, 8), nothing),
    ):
        total, _ = weighted_linear_cross_entropy(hidden[part], weight, targets[part], weights[part], PLAIN)
        total.backward()
    torch.testing.assert_close(weight.grad, whole, rtol=1e-9, atol=1e-12)


class Recorder(TorchDispatchMode):
    """Counts matrix products and remembers the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "linear")
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_logits_of_all_tokens_never_exist() -> None:
    """t·v = 64·512 numbers would be the largest tensor; the largest is the weight or one chunk's logits."""
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(512, 4, requires_grad=True)
    targets, ones = torch.zeros(64, dtype=torch.int64), torch.ones(64)
    with Recorder() as record:
        linear_cross_entropy(hidden, weight, targets, Projection(512, SINGLE, 8)).sum().backward()
        weighted_linear_cross_entropy(hidden, weight, targets, ones, Projection(512, SINGLE, 8))[0].backward()
    assert record.largest == 8 * 512


@pytest.mark.parametrize(
    ("train_hidden", "train_weight", "no_grad", "per_token", "weighted"),
    [
        (True, True, False, 4, 3),
        (True, False, False, 3, 2),
        (False, True, False, 3, 2),
        (True, True, True, 1, 1),
    ],
)
def test_only_the_wanted_gradients_are_computed(
    train_hidden: bool, train_weight: bool, no_grad: bool, per_token: int, weighted: int
) -> None:
    """Matrix products: the logits (per token: twice) and one per wanted gradient; under no_grad the logits alone."""
    hidden, weight, targets, grad = case()
    hidden.requires_grad_(train_hidden)
    weight.requires_grad_(train_weight)

    def products(total: Callable[[], Tensor]) -> int:
        hidden.grad = weight.grad = None
        with Recorder() as record, torch.set_grad_enabled(not no_grad):
            value = total()
            if not no_grad:
                value.backward()
        assert (hidden.grad is not None, weight.grad is not None) == (
            train_hidden and not no_grad,
            train_weight and not no_grad,
        )
        return record.products

    assert products(lambda: linear_cross_entropy(hidden, weight, targets, PLAIN).sum()) == per_token
    assert products(lambda: weighted_linear_cross_entropy(hidden, weight, targets, grad, PLAIN)[0]) == weighted


def test_gradients_are_scaled_in_place_only_once() -> None:
    hidden, weight, targets, grad = case()
    total, _ = weighted_linear_cross_entropy(hidden.requires_grad_(), weight, targets, grad, PLAIN)
    (2 * total).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        total.backward()


@pytest.mark.parametrize("bad", [-100, VOCAB, VOCAB + 3])
def test_targets_outside_the_vocabulary_are_refused(bad: int) -> None:
    """Also those that exist as padding rows: they would be trained on silently."""
    hidden, weight, targets, grad = case()
    targets[5] = bad
    rows = pad(weight, 72)
    for call in (
        lambda: linear_cross_entropy(hidden, rows, targets, PLAIN),
        lambda: weighted_linear_cross_entropy(hidden, rows, targets, grad, PLAIN),
    ):
        with pytest.raises(UserError, match="outside the vocabulary of 67"):
            call()


def _z_gradients(rank: int, world: int, compiled: bool) -> tuple[Tensor, ...]:
    """(value, Σ weights · logsumexp², gradients of hidden, this rank's weight and bias) with a z-loss."""
    state = ParallelState.build(Topology({"pipe": 1, "data": 1, "model": world}), rank, torch.device("cpu"))
    hidden, weight, targets, grad = case()
    rows = padded_vocab(world)
    mine = slice(rank * rows // world, (rank + 1) * rows // world)
    part = pad(weight, rows)[mine].clone().requires_grad_()
    bias = pad(some_bias(), rows)[mine].clone().requires_grad_()
    hidden.requires_grad_()
    z_loss = ZLoss(Z_WEIGHT, torch.device("cpu"))
    projection = Projection(VOCAB, state, 7, compiled, softcap=3.0, z_loss=z_loss)
    value, _ = weighted_linear_cross_entropy(hidden, part, targets, grad, projection, bias)
    value.backward()
    with torch.no_grad():  # an evaluation does not count
        weighted_linear_cross_entropy(hidden, part, targets, grad, projection, bias)
    return value.detach(), z_loss.total, hidden.grad, part.grad, bias.grad


Z_WEIGHT = 0.05


@pytest.mark.parametrize(("world", "compiled"), [(1, False), (3, False), (1, True)])
def test_z_loss(world: int, compiled: bool) -> None:
    """In the gradient, in fp64, and beside the value; 3 ranks: one of them holds padding alone."""
    hidden, weight, targets, grad = case()
    inputs = [x.requires_grad_() for x in (hidden, weight, some_bias())]
    logits = 3.0 * torch.tanh((inputs[0] @ inputs[1].T + inputs[2]) / 3.0)
    plain = (F.cross_entropy(logits, targets, reduction="none") * grad).sum()
    squares = (torch.logsumexp(logits, -1).square() * grad).sum()
    wanted = torch.autograd.grad(plain + Z_WEIGHT * squares, inputs)
    ranks = run_distributed(_z_gradients, world, compiled, timeout=120)
    for value, total, hidden_gradient, *_ in ranks:
        torch.testing.assert_close(value, plain.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(total.double(), squares.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(hidden_gradient, wanted[0], rtol=1e-10, atol=1e-12)
    for place, full in ((3, wanted[1]), (4, wanted[2])):
        found = torch.cat([rank[place] for rank in ranks])
        torch.testing.assert_close(found[:VOCAB], full, rtol=1e-10, atol=1e-12)
        assert not found[VOCAB:].any()
