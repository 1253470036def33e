"""Collectives over the tensor-parallel ("model") group that autograd and torch.compile understand.

Legend: t = b·s tokens, h hidden, /tp = this rank's part. Sequence parallelism splits dim 0, the tokens.

Each function states its forward and its backward. All of them return their input when there is one tensor-parallel
rank. They are built on functional collectives, which torch.compile traces without a graph break; the raw operators are
used because the public wrappers return a lazy tensor subclass in eager mode.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.mpu.state import ParallelState

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, state: ParallelState, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Sum or maximum of `x` over the tensor-parallel ranks, as a new tensor. Outside autograd."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, _group_name(state)))


def all_gather(x: Tensor, state: ParallelState) -> Tensor:
    """[n, ...] of every rank, one after the other: [n·tp, ...]. Outside autograd."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), state.tp_size, _group_name(state)))


def reduce_scatter(x: Tensor, state: ParallelState) -> Tensor:
    """This rank's rows of the sum over ranks: [n, ...] -> [n/tp, ...]. Outside autograd."""
    _check_divides(x, state)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", state.tp_size, _group_name(state)))


def own_rows(x: Tensor, state: ParallelState) -> Tensor:
    """This rank's rows of a tensor all ranks hold: [n, ...] -> [n/tp, ...]. Outside autograd."""
    _check_divides(x, state)
    rows = x.shape[0] // state.tp_size
    return x.narrow(0, state.tp_rank * rows, rows).contiguous()


def _group_name(state: ParallelState) -> str:
    group = state.group("model")
    if group is None:
        raise ValueError("there is only one tensor-parallel rank, so there is nobody to communicate with")
    return group.group_name


def _check_divides(x: Tensor, state: ParallelState) -> None:
    if x.shape[0] % state.tp_size:
        raise UserError(
            f"sequence_parallel splits the {x.shape[0]} tokens of a micro-batch over model_parallel_size="
            f"{state.tp_size}, which does not divide them; change train_micro_batch_size_per_gpu, seq_length or "
            f"model_parallel_size, or set sequence_parallel to false"
        )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState) -> Tensor:
        ctx.state = state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.state), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState) -> Tensor:
        return all_reduce(x, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState) -> Tensor:
        ctx.state = state
        return all_gather(x, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.state), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState, partial: bool) -> Tensor:
        ctx.state = state
        return (reduce_scatter if partial else own_rows)(x, state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.state), None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: ParallelState) -> Tensor:
        ctx.state, ctx.size = state, x.shape[-1]
        return torch.cat(all_gather(x.reshape(-1, x.shape[-1]), state).chunk(state.tp_size), -1).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.state.tp_rank * ctx.size, ctx.size), None


class _Join(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_rows(grad, ctx.state), None


def enter_tensor_parallel(x: Tensor, state: ParallelState) -> Tensor:
    """Into a region where every rank works on all tokens with its part of the weights: -> [t, h].

    Without sequence parallelism x is [t, h]: identity; backward sums the gradient over ranks.
    With it x is [t/tp, h]: gather; backward sums the gradient and keeps this rank's tokens.
    """
    if state.tp_size == 1:
        return x
    return _Gather.apply(x, state) if state.sequence_parallel else _Copy.apply(x, state)


def leave_tensor_parallel(x: Tensor, state: ParallelState) -> Tensor:
    """Out of that region: x [t, h] is this rank's partial sum.

    Without sequence parallelism: sum over ranks -> [t, h]; backward is the identity.
    With it: sum, this rank's tokens -> [t/tp, h]; backward gathers.
    """
    if state.tp_size == 1:
        return x
    return _Scatter.apply(x, state, True) if state.sequence_parallel else _Reduce.apply(x, state)


def sum_partials(x: Tensor, state: ParallelState) -> Tensor:
    """The sum over ranks of what each has in part, whole on all of them under sequence parallelism as well, which go on
    to the same computation; backward is the identity."""
    return x if state.tp_size == 1 else _Reduce.apply(x, state)


def split_sequence(x: Tensor, state: ParallelState) -> Tensor:
    """[t, ...], the same on all ranks, -> [t/tp, ...]; backward gathers. Identity without sequence parallelism."""
    return _Scatter.apply(x, state, False) if state.sequence_parallel else x


def join_sequence(x: Tensor, state: ParallelState) -> Tensor:
    """The inverse of `split_sequence`: [t/tp, ...] -> [t, ...], used by all ranks for the same computation; backward
    keeps this rank's part. Identity without sequence parallelism."""
    return _Join.apply(x, state) if state.sequence_parallel and state.tp_size > 1 else x


def gather_last_dim(x: Tensor, state: ParallelState) -> Tensor:
    """[..., v/tp] -> [..., v] (logits), used by all ranks for the same computation; backward keeps this rank's part."""
    return x if state.tp_size == 1 else _GatherLast.apply(x, state)


def count_once(x: Tensor, state: ParallelState) -> Tensor:
    """A value that every tensor-parallel rank computes alike inside the region, where gradients are summed over ranks:
    the same value with a tp-th of its gradient. For what a feed-forward adds to the loss."""
    part = x / state.tp_size
    return part + (x - part).detach()


def sum_gradient(w: Tensor, state: ParallelState, inside: Literal["sequence", "tensor"] = "sequence") -> Tensor:
    """A replicated weight, as it must enter a region where ranks see different things; backward sums over ranks.

    `inside="sequence"`: ranks see different tokens (norms, row biases, position embeddings); identity without sequence
    parallelism, where all ranks compute the same whole gradient. `inside="tensor"`: ranks see different heads or
    columns (a query/key norm shared by all heads); sums whenever there are several tensor-parallel ranks.
    """
    needed = state.tp_size > 1 if inside == "tensor" else state.sequence_parallel
    return _Copy.apply(w, state) if needed else w
