"""The selective scan of Mamba-1 in plain torch: right on every device, differentiable, in bounded memory.

Legend: b batch, s sequence, c channels, n state per channel, T steps of a block, K stretches run side by side, r = b·K.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]        A [c, n] < 0, h [c, n]
    y[t] = h[t] C[t]                                    (Gu & Dao 2023, equations 2 and 3 with section 3.6)

Only exponentials of numbers <= 0 are taken and nothing is divided, so nothing overflows. What costs time is done for
blocks of T steps at once; the recurrence itself is one fused multiply-add per step of a block. Where the channels alone
do not fill the device, the sequence is cut into K stretches: one pass finds the state each begins with, a second one
runs them side by side. Backward keeps the states at the blocks' borders and computes the ones between again.

States are kept as [n, c]: the channels, of which there are many, are the contiguous dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.layers.chunks import wide_type

# Numbers in one step of the recurrence that keep a device busy, and steps of a block. Measured on CPUs.
_BUSY = {"cpu": 1 << 12, "cuda": 1 << 20}
_BLOCK = 16


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    stretches: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x, dt [b, s, c], a [c, n] (negative), b, c [b, s, n] -> (y [b, s, c], the last state [b, n, c]).

    Args:
        dt: step sizes, after softplus.
        starts: bool [b, s], True at the first token of each packed document: the state before it counts exactly 0.
        state: [b, n, c] before the first token (None: zeros). No gradient flows into it, nor out of the last state.
        stretches: how many parts of the sequence run side by side (None: what keeps the device busy).

    Computes in fp32 (fp64 for fp64); y has x's type, the state is fp32.
    """
    if stretches is None:
        stretches = _stretches(x, a)
    return _Scan.apply(x, dt, a, b, c, starts, state, stretches)


def scan_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token: x, dt [b, c], b, c [b, n], state [b, n, c] -> (y [b, c], the new state)."""
    wide = state.dtype
    x_, dt_ = x.to(wide), dt.to(wide)
    decay = torch.exp(dt_.unsqueeze(1) * a.to(wide).T)
    state = torch.addcmul((dt_ * x_).unsqueeze(1) * b.to(wide).unsqueeze(2), decay, state)
    return torch.matmul(c.to(wide).unsqueeze(1), state).squeeze(1).to(x.dtype), state


def _stretches(x: Tensor, a: Tensor) -> int:
    busy = _BUSY.get(x.device.type, _BUSY["cuda"])
    wanted = busy // max(1, x.shape[0] * a.numel())
    return max(1, min(wanted, x.shape[1] // (2 * _BLOCK)))


@dataclass(frozen=True)
class _Rows:
    """The inputs by step: [steps, r, ...] views, r rows of which K in turn are one sample's stretches.

    Steps added at the end to fill the last stretch have dt = 0 and x = 0, which leaves the state as it is.
    """

    x: Tensor
    dt: Tensor
    a: Tensor  # [n, c]
    b: Tensor
    c: Tensor
    keep: Tensor | None  # [steps, r]: 0 at the start of a document, else 1
    stretches: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, k: int) -> _Rows:
        dtype = wide_type(x)
        keep = None if starts is None else 1 - by_step(starts.to(dtype).unsqueeze(2), k).squeeze(2)
        parts = [by_step(part, k) for part in (x, dt, b, c)]
        return cls(parts[0], parts[1], a.to(dtype).T.contiguous(), parts[2], parts[3], keep, k, dtype)

    @property
    def steps(self) -> int:
        return self.x.shape[0]

    def blocks(self) -> list[slice]:
        return [slice(first, min(first + _BLOCK, self.steps)) for first in range(0, self.steps, _BLOCK)]

    def zero_state(self) -> Tensor:
        return torch.zeros(self.x.shape[1], *self.a.shape, dtype=self.dtype, device=self.x.device)

    def wide(self, part: Tensor, block: slice) -> Tensor:
        return part[block].to(self.dtype)

    def decays(self, block: slice) -> Tensor:
        """exp(dt A) [T, r, n, c], 0 where a document starts."""
        decay = (self.wide(self.dt, block).unsqueeze(2) * self.a).exp_()
        return decay if self.keep is None else decay.mul_(self.keep[block][:, :, None, None])

    def states(self, block: slice, decay: Tensor, before: Tensor) -> Tensor:
        """h [T, r, n, c] after each step of a block, from the state `before` it."""
        drive = self.wide(self.dt, block) * self.wide(self.x, block)
        states = drive.unsqueeze(2) * self.wide(self.b, block).unsqueeze(3)
        for now, factor in zip(states.unbind(0), decay.unbind(0), strict=True):
            before = now.addcmul_(factor, before)
        return states

    def through(self) -> Tensor:
        """[r, n, c]: what is left after a whole stretch of the state before it."""
        total = torch.exp(self.dt.to(self.dtype).sum(0).unsqueeze(1) * self.a)
        return total if self.keep is None else total * self.keep.amin(0)[:, None, None]

    def first_states(self, state: Tensor | None) -> Tensor:
        """[r, n, c]: the state before each stretch."""
        if self.stretches == 1:
            return self.zero_state() if state is None else state.to(self.dtype)
        end = self.zero_state()
        for block in self.blocks():
            end = self.states(block, self.decays(block), end)[-1]
        return self._chain(end, state, reverse=False)

    def last_gradients(self, dy: Tensor) -> Tensor:
        """[r, n, c]: the gradient of the state after each stretch, from the stretches behind it."""
        carry = self.zero_state()
        if self.stretches == 1:
            return carry
        for block in reversed(self.blocks()):
            carry = self.gradients(block, self.decays(block), dy, carry)[1]
        return self._chain(carry, None, reverse=True)

    def gradients(self, block: slice, decay: Tensor, dy: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """(gradient of h [T, r, n, c], of the state before the block), from that of the state behind it."""
        grads = self.wide(self.c, block).unsqueeze(3) * self.wide(dy, block).unsqueeze(2)
        parts = grads.unbind(0)
        parts[-1].add_(carry)
        for i in range(len(parts) - 2, -1, -1):
            parts[i].addcmul_(decay[i + 1], parts[i + 1])
        return grads, decay[0] * parts[0]

    def _chain(self, ends: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
        """What enters each stretch, given what each makes of nothing (`ends`) and of what enters (`through`)."""
        shape = (-1, self.stretches, *self.a.shape)
        own, through = ends.view(shape), self.through().view(shape)
        enter = torch.zeros_like(own)
        order = list(range(self.stretches))[:: -1 if reverse else 1]
        if first is not None:
            enter[:, order[0]] = first.to(self.dtype)
        for before, now in pairwise(order):
            enter[:, now] = own[:, before] + through[:, before] * enter[:, before]
        return enter.flatten(0, 1)


def by_step(part: Tensor, stretches: int) -> Tensor:
    """[b, s, m] -> [steps, b·K, m], filled up with zeros."""
    batch, s, m = part.shape
    steps = -(-s // stretches)
    part = F.pad(part, (0, 0, 0, steps * stretches - s)) if steps * stretches > s else part
    return part.reshape(batch * stretches, steps, m).transpose(0, 1)


def by_token(rows: Tensor, batch: int, s: int) -> Tensor:
    """The inverse of `by_step`: [steps, b·K, m] -> [b, s, m]."""
    return rows.transpose(0, 1).reshape(batch, -1, rows.shape[2])[:, :s]


def over_states(parts: Tensor, weights: Tensor) -> Tensor:
    """[T, r, n, c], [T, r, n] -> [T, r, c]. As a product of matrices it would be one call per row."""
    return (parts * weights.unsqueeze(3)).sum(2)


def over_channels(parts: Tensor, values: Tensor) -> Tensor:
    """[T, r, n, c], [T, r, c] -> [T, r, n]."""
    return (parts * values.unsqueeze(2)).sum(3)


class _Scan(torch.autograd.Function):
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
        stretches: int,
    ) -> tuple[Tensor, Tensor]:
        rows = _Rows.of(x, dt, a, b, c, starts, stretches)
        keeps = any(ctx.needs_input_grad)
        y = x.new_empty(rows.x.shape)
        now, borders = rows.first_states(state), []
        for block in rows.blocks():
            if keeps:
                borders.append(now)
            states = rows.states(block, rows.decays(block), now)
            now = states[-1].clone() if keeps else states[-1]  # a view would keep the whole block
            y[block] = over_states(states, rows.wide(rows.c, block))
        if keeps:
            ctx.save_for_backward(x, dt, a, b, c, starts, torch.stack(borders))
            ctx.stretches = stretches
        last = now.view(x.shape[0], stretches, *now.shape[1:])[:, -1]
        ctx.mark_non_differentiable(last)
        return by_token(y, *x.shape[:2]), last

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, starts, borders = ctx.saved_tensors
        rows = _Rows.of(x, dt, a, b, c, starts, ctx.stretches)
        dy = by_step(dy, ctx.stretches)
        shapes = (rows.x, rows.dt, rows.b, rows.c)
        dx, ddt, db, dc = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in shapes)
        da = torch.zeros_like(rows.a)
        carry = rows.last_gradients(dy)
        for block, before in zip(reversed(rows.blocks()), borders.flip(0).unbind(0), strict=True):
            decay = rows.decays(block)
            states = rows.states(block, decay, before)
            grads, carry = rows.gradients(block, decay, dy, carry)
            x_, dt_, b_ = rows.wide(rows.x, block), rows.wide(rows.dt, block), rows.wide(rows.b, block)
            dc[block] = over_channels(states, rows.wide(dy, block))
            db[block] = over_channels(grads, dt_ * x_)
            drive = over_states(grads, b_)
            dx[block] = drive * dt_
            # Gradient of dt A: of the decay, times the decay.
            grads.mul_(decay)
            grads[0].mul_(before)
            grads[1:].mul_(states[:-1])
            ddt[block] = torch.mul(grads, rows.a, out=states).sum(2).addcmul_(drive, x_)
            da += grads.mul_(dt_.unsqueeze(2)).sum((0, 1))
        tokens = [by_token(part, *x.shape[:2]) for part in (dx, ddt, db, dc)]
        return tokens[0], tokens[1], da.T.to(a.dtype), tokens[2], tokens[3], None, None, None
