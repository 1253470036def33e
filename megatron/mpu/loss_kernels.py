"""The element-wise part of the cross entropy over one chunk of logits, compiled.

Legend: c tokens of a chunk, r real vocabulary rows of this rank.

As single operations these read and write [c, r] some ten times, in fp32; a compiled kernel reads logits in their own
type twice for the sums and once for the gradient, which it writes in that type. On a GPU that is most of the time of
the loss next to its matrix products. The arithmetic is fp32 either way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """What sums over the vocabulary are taken in."""
    return torch.promote_types(dtype, torch.float32)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap): bounded by ±cap, with slope 1 at 0 (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(logits / cap)


def row_sums(logits: Tensor, index: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """logits [c, r], index [c] -> (logsumexp [c], the logit at index [c]), at least fp32; logits are capped first."""
    wide = logits.to(at_least_fp32(logits.dtype))
    if cap is not None:
        wide = soft_cap(wide, cap)
    return torch.logsumexp(wide, -1), wide.gather(1, index.unsqueeze(1)).squeeze(1)


def logits_gradient(
    logits: Tensor, log_sum: Tensor, index: Tensor, mine: Tensor, cap: float | None = None, z_weight: float = 0.0
) -> Tensor:
    """softmax - onehot [c, r] in the type of the logits; the one only where `mine` [c]. With the z-loss, its gradient
    more; with a cap, times its slope."""
    wide = logits.to(at_least_fp32(logits.dtype))
    if cap is not None:
        wide = soft_cap(wide, cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = (columns == index.unsqueeze(1)) & mine.unsqueeze(1)
    softmax = (wide - log_sum.unsqueeze(1)).exp()
    if z_weight:
        softmax = softmax * (1 + 2 * z_weight * log_sum).unsqueeze(1)
    gradient = softmax - hit.to(wide.dtype)
    return (gradient if cap is None else gradient * cap_slope(wide, cap)).to(logits.dtype)


def cap_slope(capped: Tensor, cap: float) -> Tensor:
    """The derivative of `soft_cap` where it gave `capped`: 1 - tanh²."""
    return 1.0 - (capped / cap).square()


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of one of the functions above; made at its first call."""
    return torch.compile(function)
