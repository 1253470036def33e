"""The state space dual form of Mamba-2 in plain torch: matrix products per chunk, differentiable, in bounded memory.

Legend: b batch, s sequence, L tokens of a chunk, n_h heads of p channels, g groups of heads, n state per channel.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] ⊗ B[t]      A one number < 0 per head, h [p, n]
    y[t] = h[t] C[t]                                    (Dao & Gu 2024, section 6)

Inside a chunk y is (C Bᵀ ∘ decay) x, between chunks a state is handed on. The decay from token j to token i is
exp(S[i] - S[j]) with S the running sum of dt A: only exponentials of numbers <= 0 are taken, so nothing overflows.
Only one chunk's matrices exist at a time; backward keeps the state before each chunk and computes the rest again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    chunk: int,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [b, s, n_h, p], dt [b, s, n_h], a [n_h] (negative), b, c [b, s, g, n] -> (y like x, last state [b, n_h, p, n]).

    Args:
        dt: step sizes, after softplus.
        chunk: tokens per chunk; bounds memory and time, not the result.
        starts: bool [b, s], True at the first token of each packed document: the state before it counts exactly 0.
        state: [b, n_h, p, n] before the first token (None: zeros). No gradient flows into it or out of the last one.

    Computes in fp32 (fp64 for fp64); y has x's type, the state is fp32.
    """
    return _ChunkedScan.apply(x, dt, a, b, c, starts, state, chunk)


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x [b, n_h, p], dt [b, n_h], b, c [b, g, n], state [b, n_h, p, n] -> (y [b, n_h, p], the new state)."""
    wide, heads = state.dtype, x.shape[1] // b.shape[1]
    dt_ = dt.to(wide)
    b_, c_ = (part.to(wide).repeat_interleave(heads, dim=1) for part in (b, c))
    drive = (x.to(wide) * dt_.unsqueeze(2)).unsqueeze(3) * b_.unsqueeze(2)
    state = torch.addcmul(drive, torch.exp(dt_ * a.to(wide))[:, :, None, None], state)
    return torch.matmul(state, c_.unsqueeze(3)).squeeze(3).to(x.dtype), state


def _chunk(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, document: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk: (y [b, L, n_h, p], the state behind it), all in the type of `before`.

    `document` [b, L] counts the starts of documents so far, the chunk's own included: equal numbers see each other, 0
    sees the state before the chunk.
    """
    wide = before.dtype
    batch, length, heads, p = x.shape
    groups, n = b.shape[2:]
    dt = dt.to(wide)
    driven = (x.to(wide) * dt.unsqueeze(3)).transpose(1, 2)  # [b, n_h, L, p]
    b, c = (part.to(wide).transpose(1, 2) for part in (b, c))  # [b, g, L, n]
    # In fp64: of two large sums the difference is what counts.
    sums = (dt.double() * a.double()).cumsum(1).transpose(1, 2)  # [b, n_h, L]

    visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril_()
    entering, leaving, through = sums, sums[:, :, -1:] - sums, sums[:, :, -1]
    if document is not None:
        visible = visible & (document.unsqueeze(2) == document.unsqueeze(1)).unsqueeze(1)
        first, last = document == 0, document == document[:, -1:]
        entering = entering.masked_fill(~first.unsqueeze(1), -torch.inf)
        leaving = leaving.masked_fill(~last.unsqueeze(1), -torch.inf)
        through = through.masked_fill(~first[:, -1:], -torch.inf)
    between = (sums.unsqueeze(3) - sums.unsqueeze(2)).to(wide).masked_fill(~visible, -torch.inf)
    entering, leaving, through = (part.to(wide) for part in (entering, leaving, through))
    scores = torch.matmul(c, b.transpose(2, 3))  # [b, g, L, L]
    mixing = between.exp().view(batch, groups, -1, length, length) * scores.unsqueeze(2)
    y = torch.matmul(mixing.view(batch, heads, length, length), driven)

    grouped = before.reshape(batch, groups, -1, n)  # [b, g, n_h/g·p, n]
    seen = torch.matmul(c, grouped.transpose(2, 3)).view(batch, groups, length, -1, p).transpose(2, 3)
    y = y + seen.reshape(batch, heads, length, p) * entering.exp().unsqueeze(3)

    added = (driven * leaving.exp().unsqueeze(3)).view(batch, groups, -1, length, p).transpose(3, 4)
    added = torch.matmul(added.reshape(batch, groups, -1, length), b)
    return y.transpose(1, 2), before * through.exp()[:, :, None, None] + added.view(before.shape)


class _ChunkedScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        starts: Tensor | None,
        state: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        batch, s, heads, p = x.shape
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if state is None:
            now = torch.zeros(batch, heads, p, b.shape[3], dtype=wide, device=x.device)
        else:
            now = state.to(wide)
        keeps = any(ctx.needs_input_grad)
        y, borders = torch.empty_like(x), []
        for part in _parts(s, chunk):
            if keeps:
                borders.append(now)
            y[:, part], now = _chunk(x[:, part], dt[:, part], a, b[:, part], c[:, part], _documents(starts, part), now)
        if keeps:
            ctx.save_for_backward(x, dt, a, b, c, starts, *borders)
            ctx.chunk = chunk
        last = now.clone() if now is state else now
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, starts, *borders = ctx.saved_tensors
        grads = [torch.empty_like(part) for part in (x, dt, b, c)]
        da, carry = torch.zeros_like(a), torch.zeros_like(borders[0])
        for part, before in zip(reversed(_parts(x.shape[1], ctx.chunk)), reversed(borders), strict=True):
            inputs = [piece.detach().requires_grad_() for piece in (x[:, part], dt[:, part], b[:, part], c[:, part])]
            a_, before_ = a.detach().requires_grad_(), before.detach().requires_grad_()
            with torch.enable_grad():
                x_, dt_, b_, c_ = inputs
                outputs = _chunk(x_, dt_, a_, b_, c_, _documents(starts, part), before_)
            incoming = (dy[:, part].to(outputs[0].dtype), carry)
            *own, da_, carry = torch.autograd.grad(outputs, (*inputs, a_, before_), incoming)
            da += da_
            for whole, piece in zip(grads, own, strict=True):
                whole[:, part] = piece
        return grads[0], grads[1], da, grads[2], grads[3], None, None, None


def _parts(s: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, s)) for first in range(0, s, chunk)]


def _documents(starts: Tensor | None, part: slice) -> Tensor | None:
    return None if starts is None else starts[:, part].cumsum(1)
