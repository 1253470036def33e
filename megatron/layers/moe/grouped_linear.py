"""One matrix product with a matrix of its own for each group of consecutive rows.

Legend: r rows, G groups (the experts of this rank), in and out features.

On a GPU it is torch's grouped matrix product where it takes the type and the sizes; everywhere else one product per
group, written into one result. Both are single operators for autograd: no slice's gradient is ever as large as all
weights together, which is what autograd would make of `weight[g]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Groups:
    """How many consecutive rows each group has: `sizes` int64 [G], on the rows' device.

    `host` may be given by who knows the sizes already; else they are read from the device when somebody asks. The rows
    may continue behind the last group: those belong to nobody, and the result there is undefined.
    """

    def __init__(self, sizes: Tensor, host: list[int] | None = None) -> None:
        self.sizes = sizes
        self._host = host
        self._offsets: Tensor | None = None

    @property
    def offsets(self) -> Tensor:
        """Where each group ends, int32 [G] on the device."""
        if self._offsets is None:
            self._offsets = self.sizes.cumsum(0).to(torch.int32)
        return self._offsets

    @property
    def host(self) -> list[int]:
        """The sizes as numbers; waits for the device if they were not given."""
        if self._host is None:
            self._host = self.sizes.tolist()
        return self._host

    @property
    def bounds(self) -> list[int]:
        """Where groups begin and the last one ends, G + 1 numbers."""
        return [0, *accumulate(self.host)]

    def of_rows(self, rows: int) -> Tensor:
        """The group of each row, int64 [rows]; G for rows behind the last group."""
        return torch.searchsorted(self.offsets, torch.arange(rows, device=self.sizes.device), right=True)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    bias: Tensor | None = None,
    grouped: Collection[torch.dtype] = (),
) -> Tensor:
    """x [r, in], weight [G, out, in], bias [G, out] -> [r, out]: row i of group g is x_i · weight_gᵀ + bias_g.

    `grouped`: the types for which torch's grouped product may be used (`grouped_types`).
    """
    if not _takes_grouped(x, weight, grouped):
        # Without rows there is nothing to ask the device for.
        return one_by_one(x, weight, bias, groups.bounds if len(x) else [0] * (len(weight) + 1))
    y = _torch_grouped()(x, weight.transpose(1, 2), offs=groups.offsets)
    if bias is None:
        return y
    # Rows behind the last group take, and give their undefined gradient to, a bias of nobody's.
    return y + F.pad(bias, (0, 0, 0, 1)).index_select(0, groups.of_rows(x.shape[0]))


@torch.library.custom_op("deepy::grouped_linear", mutates_args=())
def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int]) -> Tensor:
    """The plain loop. Rows behind the last group are zero."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    y[bounds[-1] :].zero_()
    for group, rows in _filled(bounds):
        if bias is None:
            torch.mm(x[rows], weight[group].t(), out=y[rows])
        else:
            torch.addmm(bias[group], x[rows], weight[group].t(), out=y[rows])
    return y


@one_by_one.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, bounds: list[int]) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _filled(bounds: list[int]) -> Iterator[tuple[int, slice]]:
    return ((i, slice(first, last)) for i, (first, last) in enumerate(pairwise(bounds)) if last > first)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.bounds = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    for_x, for_weight, for_bias, _ = ctx.needs_input_grad
    dx, dw, db = None, None, None
    if for_x:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dx[ctx.bounds[-1] :].zero_()
    if for_weight:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for group, (first, last) in enumerate(pairwise(ctx.bounds)):
            if first == last:
                dw[group].zero_()  # an expert that no token came to has a gradient: none
    if ctx.has_bias and for_bias:
        db = weight.new_zeros(weight.shape[:2])
    for group, rows in _filled(ctx.bounds):
        if dx is not None:
            torch.mm(grad[rows], weight[group], out=dx[rows])
        if dw is not None:
            torch.mm(grad[rows].t(), x[rows], out=dw[group])
        if db is not None:
            torch.sum(grad[rows], 0, out=db[group])
    return dx, dw, db, None


one_by_one.register_autograd(_differentiate, setup_context=_remember)


def _torch_grouped() -> Callable[..., Tensor]:
    """torch's grouped product: public since 2.10, private before."""
    return getattr(F, "grouped_mm", None) or torch._grouped_mm


def _takes_grouped(x: Tensor, weight: Tensor, grouped: Collection[torch.dtype]) -> bool:
    """Whether torch's grouped product does this: in a type it takes, with rows of whole 16 bytes."""
    if x.dtype not in grouped or x.dtype != weight.dtype or x.shape[0] == 0:
        return False
    return all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])


def grouped_types(device: torch.device) -> frozenset[torch.dtype]:
    """The types that torch's grouped product takes on a device; none but on a GPU, where alone it is faster.

    Ask when a layer is built, never in its forward pass: finding out is a backward pass of its own, whose tensors
    activation checkpointing would count as the layer's, and which inference mode does not allow.
    """
    if device.type != "cuda":
        return frozenset()
    return frozenset(t for t in (torch.bfloat16, torch.float16, torch.float32) if works_grouped(t, device))


@cache
def works_grouped(dtype: torch.dtype, device: torch.device) -> bool:
    """Tried once: forward and backward of two tiny groups."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(32, 32, dtype=dtype, device=device, requires_grad=True)
        weight = torch.ones(2, 32, 32, dtype=dtype, device=device, requires_grad=True)
        offsets = torch.tensor([16, 32], dtype=torch.int32, device=device)
        try:
            y = _torch_grouped()(x, weight.transpose(1, 2), offs=offsets)
            y.backward(torch.ones_like(y))
        except (AttributeError, RuntimeError):  # not in this torch; not for this type or device
            return False
        return bool((y == 32).all())
