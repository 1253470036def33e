"""RWKV-4's attention without queries (WKV): a mean of values whose weights fade with distance.

Legend: b batch, s sequence, c channels, L tokens of a chunk. Peng et al. 2023 (arXiv 2305.13048), equations 16 and 22:

    y_t = (Σ_{i<t} exp((t-1-i) w + k_i) v_i + exp(u + k_t) v_t) / (the same without v)        w < 0, per channel

as a recurrence of numerator and denominator, both held as a · exp(m): m follows the largest exponent, so nothing
overflows whatever the keys are. m is kept in fp64: in fp32 its decay, the same small step at every token, is rounded
the same way every time. Exponentials are taken of whole chunks; what remains token by token is one fused multiply-add.
Only the states at the borders of chunks are kept for the backward pass, which computes each chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.layers.chunks import slices, wide_type

# m before the first token of a text; a key of this value counts exactly 0 next to any other. Exact in every wide type.
NOTHING = -(2.0**99)
CHUNK = 64


def wkv(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """k, v [b, s, c], w (negative), u [c] -> (y like v, last state [b, 3, c] in fp64: numerator, denominator, m).

    Args:
        starts: bool [b, s], True at the first token of each packed document: what is before it counts exactly 0.
        state: the state before the first token (None: nothing). No gradient flows into it or out of the last one.
        chunk: tokens per chunk; bounds memory, not the result.

    Computes in fp32 (fp64 for fp64).
    """
    return _Wkv.apply(k, v, w, u, starts, state, chunk)


def _chunk(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor | None, sums: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk [b, L, c] behind sums [b, 2, c] · exp(m [b, c]): (y, the sums behind it, their m)."""
    wide, w, wide_k = sums.dtype, w.double(), k.double()
    before, after = _largest(wide_k.detach(), w.detach(), starts, m)
    own = wide_k + u.double()
    top = torch.maximum(before, own.detach())
    # Whatever m and `top` are, y is the same: no gradient passes through them.
    keep = (before + w - after).to(wide).exp()
    add = (wide_k - after).to(wide).exp()
    seen, own = (before - top).to(wide).exp(), (own - top).to(wide).exp()
    v = v.to(wide)
    all_sums = _Scan.apply(keep, torch.stack((add * v, add), dim=2), sums)
    earlier = torch.cat((sums.unsqueeze(1), all_sums[:, :-1]), dim=1)
    y = (seen * earlier[:, :, 0] + own * v) / (seen * earlier[:, :, 1] + own)
    return y, all_sums[:, -1], after[:, -1]


def _largest(k: Tensor, w: Tensor, starts: Tensor | None, m: Tensor) -> tuple[Tensor, Tensor]:
    """m before and behind each token [b, L, c], in fp64."""
    before, after = torch.empty_like(k), torch.empty_like(k)
    for t in range(k.shape[1]):
        if starts is not None:
            m = m.masked_fill(starts[:, t : t + 1], NOTHING)
        before[:, t] = m
        m = torch.maximum(m + w, k[:, t])
        after[:, t] = m
    return before, after


class _Scan(torch.autograd.Function):
    """state_t = keep_t state_{t-1} + x_t: keep [b, L, c], x [b, L, 2, c], first [b, 2, c] -> all states, like x."""

    @staticmethod
    def forward(ctx: Any, keep: Tensor, x: Tensor, first: Tensor) -> Tensor:
        states, now = torch.empty_like(x), first
        for t in range(x.shape[1]):
            now = torch.addcmul(x[:, t], keep[:, t].unsqueeze(1), now)
            states[:, t] = now
        ctx.save_for_backward(keep, states, first)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep, states, first = ctx.saved_tensors
        dx = torch.empty_like(grad)
        now = torch.zeros_like(first)
        for t in reversed(range(grad.shape[1])):
            dx[:, t] = now = grad[:, t] + now
            now = now * keep[:, t].unsqueeze(1)
        earlier = torch.cat((first.unsqueeze(1), states[:, :-1]), dim=1)
        return (dx * earlier).sum(2), dx, now


class _Wkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        u: Tensor,
        starts: Tensor | None,
        state: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        batch, s, channels = k.shape
        wide = wide_type(k)
        if state is None:
            sums, m = k.new_zeros(batch, 2, channels, dtype=wide), k.new_full((), NOTHING, dtype=torch.float64)
            m = m.expand(batch, channels)
        else:
            sums, m = state[:, :2].to(wide), state[:, 2]
        keeps = any(ctx.needs_input_grad)
        y, borders = torch.empty_like(v), []
        for part in slices(s, chunk):
            if keeps:
                borders += [sums, m]
            y[:, part], sums, m = _chunk(k[:, part], v[:, part], w, u, _of(starts, part), sums, m)
        if keeps:
            ctx.save_for_backward(k, v, w, u, starts, *borders)
            ctx.chunk = chunk
        last = torch.cat((sums.double(), m.unsqueeze(1)), dim=1)
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        k, v, w, u, starts, *borders = ctx.saved_tensors
        dk, dv, dw, du = (torch.zeros_like(x) for x in (k, v, w, u))
        carry = torch.zeros_like(borders[0])
        behind = list(zip(slices(k.shape[1], ctx.chunk), borders[::2], borders[1::2], strict=True))
        for part, sums, m in reversed(behind):
            inputs = [x.detach().requires_grad_() for x in (k[:, part], v[:, part], w, u, sums)]
            with torch.enable_grad():
                y, last, _ = _chunk(*inputs[:4], _of(starts, part), inputs[4], m)
            grads = torch.autograd.grad((y, last), inputs, (dy[:, part].to(y.dtype), carry))
            dk[:, part], dv[:, part], carry = grads[0], grads[1], grads[4]
            dw += grads[2]
            du += grads[3]
        return dk, dv, dw, du, None, None, None


def _of(starts: Tensor | None, part: slice) -> Tensor | None:
    return None if starts is None else starts[:, part]
