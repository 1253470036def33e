"""The short causal convolution of Mamba: every channel by itself, over the last k tokens.

Legend: b batch, s sequence, c channels, k taps. Tap k-1 is the token itself, as in a convolution of weight [c, 1, k].

Taps that reach into another packed document, or to before the first token, count exactly 0. Channels stay last: a sum
of k scaled copies needs no transposition, and no copy of the input beyond its k-1 first tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, ids: Tensor | None = None, tail: Tensor | None = None
) -> Tensor:
    """x [b, s, c], weight [c, 1, k], bias [c] -> [b, s, c].

    Args:
        ids: document numbers [b, s] of packed documents.
        tail: the k-1 tokens [b, k-1, c] before x (None: zeros). Not with `ids`; no gradient flows into it.
    """
    return _Conv.apply(x, weight.squeeze(1), bias, ids, tail)


def conv_tail(x: Tensor, taps: int, tail: Tensor | None) -> Tensor:
    """The last k-1 tokens [b, k-1, c] of `tail` and x together, zeros before them."""
    before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if tail is None else tail
    return torch.cat((before, x), dim=1)[:, x.shape[1] :].contiguous()


def _reach(ids: Tensor | None, back: int, dtype: torch.dtype) -> Tensor | None:
    """[b, s - back, 1]: 1 where a token and the one `back` before it are of one document."""
    if ids is None or back == 0:
        return None
    return (ids[:, back:] == ids[:, :-back]).to(dtype).unsqueeze(2)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None, tail: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ids, tail)
        ctx.has_bias = bias is not None
        taps, s = weight.shape[1], x.shape[1]
        y = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
        for back in range(1, taps):
            tap = weight[:, taps - 1 - back]
            if back < s:
                source = x[:, :-back]
                reach = _reach(ids, back, x.dtype)
                y[:, back:].addcmul_(source if reach is None else source * reach, tap)
            if tail is not None:
                # Tokens 0 .. back-1 take this tap from the tail's last ones.
                count = min(back, s)
                first = taps - 1 - back
                y[:, :count].addcmul_(tail[:, first : first + count], tap)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ids, tail = ctx.saved_tensors
        taps, s = weight.shape[1], x.shape[1]
        dx = dy * weight[:, -1]
        dweight = torch.zeros_like(weight)
        dweight[:, -1] = (dy * x).sum((0, 1))
        for back in range(1, taps):
            tap = taps - 1 - back
            if back < s:
                later, reach = dy[:, back:], _reach(ids, back, dy.dtype)
                later = later if reach is None else later * reach
                dx[:, :-back].addcmul_(later, weight[:, tap])
                dweight[:, tap] = (later * x[:, :-back]).sum((0, 1))
            if tail is not None:
                count = min(back, s)
                dweight[:, tap] += (dy[:, :count] * tail[:, tap : tap + count]).sum((0, 1))
        return dx, dweight, dy.sum((0, 1)) if ctx.has_bias else None, None, None
