"""The state space dual form of Mamba-2 in plain torch: matrix products per chunk, differentiable, in bounded memory.

Legend: b batch, s sequence, L tokens of a chunk, n_h heads of p channels, g groups of heads, n state per channel.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] ⊗ B[t]      A one number < 0 per head, h [p, n]
    y[t] = h[t] C[t]                                    (Dao & Gu 2024, section 6)

Inside a chunk y is (C Bᵀ ∘ decay) x, between chunks a state is passed on. The decay from token j to token i is
exp(S[i] - S[j]) with S the running sum of dt A: only exponentials of numbers <= 0 are taken, so nothing overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.layers.chunks import over_chunks, wide_type


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
    if state is None:
        state = torch.zeros(x.shape[0], *x.shape[2:], b.shape[3], device=x.device)
    first = state.to(wide_type(x))
    return over_chunks(_chunk, (x, dt, b, c), (a,), first=first, starts=starts, chunk=chunk)


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x [b, n_h, p], dt [b, n_h], b, c [b, g, n], state [b, n_h, p, n] -> (y [b, n_h, p], the new state)."""
    wide, heads = state.dtype, x.shape[1] // b.shape[1]
    dt_ = dt.to(wide)
    b_, c_ = (part.to(wide).repeat_interleave(heads, dim=1) for part in (b, c))
    drive = (x.to(wide) * dt_.unsqueeze(2)).unsqueeze(3) * b_.unsqueeze(2)
    state = torch.addcmul(drive, torch.exp(dt_ * a.to(wide))[:, :, None, None], state)
    return torch.matmul(state, c_.unsqueeze(3)).squeeze(3).to(x.dtype), state


def _chunk(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, document: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk (`chunks.Step`): (y [b, L, n_h, p], the state behind it)."""
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
