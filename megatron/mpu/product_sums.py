"""Matrix products that add to fp32 sums: gradients of weights that are never stored in half precision, nor read again.

Legend: t tokens, in and out features.

Who keeps the sum of a weight's gradients leaves a `WeightSum` at the parameter; `layers.linear` then multiplies by
`summed_linear`, whose backward pass adds to the sum and gives the weight itself no gradient. What reads the weight in
another way gives it a gradient as ever: the two are added by whoever keeps the sum.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from megatron.log import get_logger

logger = get_logger(__name__)


@functools.cache
def sums_products(device: torch.device) -> bool:
    """Whether matrix products of half-precision factors can add to fp32 sums there: by cuBLAS alone. Tried once."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    a, total = torch.ones(16, 16, dtype=torch.bfloat16, device=device), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError as error:
        logger.warning(f"products on this GPU do not add to fp32 sums, so gradients are added behind them: {error}")
        return False
    return bool((total == 17).all())


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total [n, m] += a [n, k] · b [k, m], in place; the `first` is written over whatever was there.

    Where it can, the product itself adds to fp32 sums, and is never stored nor rounded to the type of its factors.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=0 if first else 1)  # a factor of 0 reads nothing: NaN stays out
    elif total.dtype == torch.float32 and sums_products(total.device):
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif first:
        total.copy_(a.mm(b))
    else:
        total += a.mm(b)


class WeightSum(NamedTuple):
    """Where the gradients of a weight [out, in] are added up.

    * `total`: fp32 [out, in].
    * `begun`: a bool on the host: whether `total` holds a gradient of this step; else it is written over.
    * `arrival`: a leaf of autograd without a value, whose gradient comes when all products of a backward pass have
      been added: its hook stands in for the weight's.
    """

    total: Tensor
    begun: Tensor
    arrival: Tensor


def offer_sum(p: Parameter, total: Tensor, begun: Tensor) -> Tensor:
    """Have products add to `total`. Returns the arrival."""
    arrival = torch.empty((), dtype=p.dtype, device=p.device, requires_grad=True)
    p.weight_sum = WeightSum(total.view(p.shape), begun, arrival)  # type: ignore[attr-defined]
    return arrival


def sum_of(w: Tensor) -> WeightSum | None:
    """What `offer_sum` left at a parameter; nothing at what was computed from one."""
    return getattr(w, "weight_sum", None)


def summed_linear(x: Tensor, w: Tensor, bias: Tensor | None, offered: WeightSum) -> Tensor:
    """x [..., in] · wᵀ + bias; the gradient of w goes to what is `offered`."""
    return _SummedLinear.apply(x, w, bias, *offered)


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, total: Tensor, begun: Tensor, arrival: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.total, ctx.begun = total, begun  # as they will be: other backward passes may come before this one
        return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        for_x = grad @ w if ctx.needs_input_grad[0] else None
        for_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        arrived = add_weight_gradient(rows, x.flatten(0, -2), ctx.total, ctx.begun)
        return for_x, None, for_bias, None, None, arrived


@torch.library.custom_op("deepy::add_weight_gradient", mutates_args=("total", "begun"))
def add_weight_gradient(grad: Tensor, x: Tensor, total: Tensor, begun: Tensor) -> Tensor:
    """total [out, in] += grad [t, out]ᵀ · x [t, in]. Returns a gradient of `WeightSum.arrival`, of any value.

    One operator, so that a graph can hold it and does not depend on whether a step has begun.
    """
    held = begun.numpy()
    add_product(total, grad.t(), x, first=not held)
    held[()] = True
    return grad.new_empty(())


@add_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, total: Tensor, begun: Tensor) -> Tensor:
    return grad.new_empty(())
