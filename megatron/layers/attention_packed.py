"""Causal attention inside packed documents, for back-ends that take them one after the other ("variable lengths").

Legend: t = b·s tokens of all rows, n query heads, n_kv key/value heads, d head dim, N documents.

A kernel that never looks outside a document does Σ lengths² work instead of b·s²; no mask exists. On a GPU that is
torch's `varlen_attn` (FlashAttention). For CPUs torch has none, so `deepy::packed_attention` runs its CPU flash kernel
document by document. Both are single operators for autograd and torch.compile, whatever the number of documents.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron.layers.attention_masks import linear_bias, visible_mask
from megatron.log import get_logger

logger = get_logger(__name__)
_aten = torch.ops.aten


@torch.library.custom_op("deepy::packed_attention", mutates_args=(), device_types="cpu")
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, window: int, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q [t, n, d], k and v [t, n_kv, d], bounds int32 [N + 1] -> (out [t, n, d], log of the softmax's sums [t, n]).

    `window`: earlier tokens that are visible, -1 for all; `slopes` fp32 [n] are ALiBi's.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    log_sums = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for rows in _documents(bounds):
        bias = _bias(rows, window, slopes, q.dtype)
        part, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            *(_one(x, rows) for x in (q, k, v)), 0.0, bias is None, attn_mask=bias, scale=scale
        )
        out[rows] = part[0].transpose(0, 1)
        log_sums[rows] = sums[0].transpose(0, 1)
    return out, log_sums


@packed_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, window: int, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=wide)


@torch.library.custom_op("deepy::packed_attention_backward", mutates_args=(), device_types="cpu")
def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    scale: float,
    window: int,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grads = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    for rows in _documents(bounds):
        bias = _bias(rows, window, slopes, q.dtype)
        parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_one(x, rows) for x in (grad, q, k, v, out)),
            _one(log_sums, rows),
            0.0,
            bias is None,
            attn_mask=bias,
            scale=scale,
        )
        for whole, part in zip(grads, parts, strict=True):
            whole[rows] = part[0].transpose(0, 1)
    return grads


@packed_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, ctx.scale, ctx.window, slopes = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, slopes)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, slopes = ctx.saved_tensors
    grads = packed_attention_backward(grad, *tensors, ctx.scale, ctx.window, slopes)
    return *grads, None, None, None, None


packed_attention.register_autograd(_differentiate, setup_context=_remember)


def _documents(bounds: Tensor) -> Iterator[slice]:
    edges = bounds.tolist()
    return (slice(first, last) for first, last in pairwise(edges) if last > first)


def _one(x: Tensor, rows: slice) -> Tensor:
    """A document as torch's kernels want it: [length, n, d] -> [1, n, length, d]; [length, n] -> [1, n, length]."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _bias(rows: slice, window: int, slopes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to a document's scores, [1, 1 or n, length, length]; None where causal is the whole mask."""
    length = rows.stop - rows.start
    narrow = 0 <= window < length - 1
    if slopes is None and not narrow:
        return None
    seen = visible_mask(length, length, torch.device("cpu"), window=window if narrow else None)
    bias = torch.zeros((), dtype=dtype) if slopes is None else linear_bias(slopes, length, length).to(dtype)
    return torch.where(seen, bias, -math.inf)


def gpu_kernel() -> Callable[..., Tensor]:
    """torch's `varlen_attn`. Ask when a layer is built: importing it takes seconds, as it imports the compiler."""
    from torch.nn.attention.varlen import varlen_attn

    # The kernel has always taken grouped heads; newer wrappers have an argument for them.
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return varlen_attn
    return lambda *args, **options: varlen_attn(*args, enable_gqa=True, **options)


def use_flash3(device: torch.device) -> bool:
    """Have torch's FlashAttention be version 3 on a Hopper GPU where its package is installed. Returns whether it is.

    It is so for the whole process, and version 3 has no dropout: for models without it.
    """
    from torch.nn import attention

    if torch.are_deterministic_algorithms_enabled():
        return False  # torch does not ask it for its repeatable backward pass
    if attention.current_flash_attention_impl() == "FA3":
        return True
    if find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logger.warning(f"flash_attn_interface is installed, but FlashAttention 3 cannot be used: {error}")
        return False
    return True
