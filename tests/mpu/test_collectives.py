"""Forward and backward of every tensor-parallel collective against the formula, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import UserError
from megatron.mpu import collectives
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.distributed import RankFailure, run_distributed

pytestmark = pytest.mark.cpu

ROWS, WIDTH = 8, 3


def seen(rank: int, salt: int, rows: int = ROWS) -> Tensor:
    """What rank `rank` puts in (or gets as a gradient); every test process can compute all of them."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * salt + rank), dtype=torch.float64)


def run(fn: Callable[..., Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = fn(x)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert y.shape == grad.shape and dx.shape == x.shape
    return y.detach(), dx


def every_collective(rank: int, world_size: int, compiled: bool) -> None:
    """Each collective on this rank's input and gradient, against the same formula on everybody's."""
    topology = Topology({"pipe": 1, "data": 1, "model": world_size})
    plain = ParallelState.build(topology, rank, "cpu")
    split = ParallelState(topology, rank, torch.device("cpu"), sequence_parallel=True, groups=plain.groups)
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    few = ROWS // world_size
    whole = [seen(r, 1) for r in range(world_size)]  # [t, h], different on every rank
    part = [seen(r, 2, few) for r in range(world_size)]  # [t/tp, h]
    total, gathered = sum(whole), torch.cat(part)
    wide = torch.cat(whole, 1)
    c = collectives
    # name: function, input, expected output, incoming gradient, expected gradient
    cases: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor, Tensor]] = {
        "enter": (lambda x: c.enter_tensor_parallel(x, plain), part[0], part[0], part[rank], sum(part)),
        "enter, sequence": (lambda x: c.enter_tensor_parallel(x, split), part[rank], gathered, whole[rank], total[own]),
        "leave": (lambda x: c.leave_tensor_parallel(x, plain), whole[rank], total, whole[0], whole[0]),
        "leave, sequence": (lambda x: c.leave_tensor_parallel(x, split), whole[rank], total[own], part[rank], gathered),
        "split": (lambda x: c.split_sequence(x, split), whole[0], whole[0][own], part[rank], gathered),
        "split, off": (lambda x: c.split_sequence(x, plain), whole[0], whole[0], whole[1], whole[1]),
        "last": (
            lambda x: c.gather_last_dim(x, plain),
            whole[rank],
            wide,
            wide * 2,
            whole[rank] * 2,
        ),
        "weight": (lambda w: c.sum_gradient(w, plain), whole[0], whole[0], whole[rank], whole[rank]),
        "weight, sequence": (lambda w: c.sum_gradient(w, split), whole[0], whole[0], whole[rank], total),
        "weight, heads": (lambda w: c.sum_gradient(w, plain, "tensor"), whole[0], whole[0], whole[rank], total),
        "weight, heads, sequence": (
            lambda w: c.sum_gradient(w, split, "tensor"),
            whole[0],
            whole[0],
            whole[rank],
            total,
        ),
    }
    for name, (fn, x, y, grad, dx) in cases.items():
        called = torch.compile(fn, fullgraph=True, backend="aot_eager") if compiled else fn
        got_y, got_dx = run(called, x, grad)
        torch.testing.assert_close(got_y, y, msg=lambda m, name=name: f"{name}, forward: {m}")
        torch.testing.assert_close(got_dx, dx, msg=lambda m, name=name: f"{name}, backward: {m}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_forward_and_backward(world_size: int) -> None:
    run_distributed(every_collective, world_size, False)


def test_compiled_without_graph_breaks() -> None:
    run_distributed(every_collective, 2, True, timeout=110)


def three_dimensional(rank: int, world_size: int) -> None:
    state = ParallelState.build(Topology({"model": world_size}), rank, "cpu")
    x = [torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    assert torch.equal(collectives.gather_last_dim(x[rank], state), torch.cat(x, -1))
    # an input that is not contiguous
    assert torch.equal(collectives.gather_last_dim(x[rank].transpose(0, 1), state), torch.cat(x, -1).transpose(0, 1))
    assert torch.equal(collectives.leave_tensor_parallel(x[rank].transpose(0, 1), state), sum(x).transpose(0, 1))
    assert torch.equal(collectives.all_reduce(x[rank], state, "max"), torch.stack(x).amax(0))
    low = x[rank].bfloat16()
    assert collectives.leave_tensor_parallel(low, state).dtype == torch.bfloat16


def test_shapes_layouts_and_dtypes() -> None:
    run_distributed(three_dimensional, 2)


def odd_tokens(rank: int, world_size: int) -> None:
    state = ParallelState.build(Topology({"model": world_size}), rank, "cpu", sequence_parallel=True)
    dist.barrier()  # a rank that fails while the other still connects makes that one fail for another reason
    collectives.leave_tensor_parallel(torch.zeros(7, 2), state)


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"sequence_parallel .*\b7 tokens .*model_parallel_size=2,") as failure:
        run_distributed(odd_tokens, 2)
    assert isinstance(failure.value.exceptions[0], UserError)


def test_one_rank_does_nothing() -> None:
    state, x = ParallelState.single(), torch.randn(3, 2)
    for fn in (
        collectives.enter_tensor_parallel,
        collectives.leave_tensor_parallel,
        collectives.split_sequence,
        collectives.gather_last_dim,
        collectives.sum_gradient,
    ):
        assert fn(x, state) is x
