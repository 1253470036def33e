"""A recurrence chunk by chunk, in bounded memory: what Mamba-2 and RWKV-6 have in common.

Legend: b batch, s sequence, L tokens of a chunk.

Only one chunk's matrices exist at a time. Backward keeps the state before each chunk and computes the chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# step(*sequences of one chunk [b, L, ...], *shared, document, before) -> (y [b, L, ...], the state behind it), in the
# type of `before`. `document` [b, L] counts the starts of documents so far, the chunk's own included (None: there is
# one document): tokens of equal numbers see each other, those of number 0 see the state before the chunk.
Step = Callable[..., tuple[Tensor, Tensor]]


def over_chunks(
    step: Step,
    sequences: tuple[Tensor, ...],
    shared: tuple[Tensor, ...],
    *,
    first: Tensor,
    starts: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(y like `sequences[0]` [b, s, ...], the state behind the last token).

    Args:
        sequences: [b, s, ...] each; `shared`: parameters that every token has in common.
        first: the state before the first token. No gradient flows into it or out of the last one.
        starts: bool [b, s], True at the first token of each packed document.
        chunk: tokens per chunk.
    """
    return _OverChunks.apply(step, chunk, len(sequences), first, starts, *sequences, *shared)


def wide_type(x: Tensor) -> torch.dtype:
    """What a recurrence of `x` is computed in: fp32, and fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def slices(s: int, chunk: int) -> list[slice]:
    """[0, s) in chunks."""
    return [slice(first, min(first + chunk, s)) for first in range(0, s, chunk)]


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, step: Step, chunk: int, count: int, first: Tensor, starts: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        sequences, shared = tensors[:count], tensors[count:]
        keeps = any(ctx.needs_input_grad)
        y, borders, now = torch.empty_like(sequences[0]), [], first
        for part in slices(y.shape[1], chunk):
            if keeps:
                borders.append(now)
            y[:, part], now = step(*(x[:, part] for x in sequences), *shared, _documents(starts, part), now)
        if keeps:
            ctx.save_for_backward(starts, *tensors, *borders)
            ctx.step, ctx.chunk, ctx.counts = step, chunk, (count, len(tensors))
        last = now.clone() if now is first else now
        ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        starts, *saved = ctx.saved_tensors
        count, total = ctx.counts
        sequences, shared, borders = saved[:count], saved[count:total], saved[total:]
        grads, sums = [torch.empty_like(x) for x in sequences], [torch.zeros_like(x) for x in shared]
        carry = torch.zeros_like(borders[0])
        for part, before in reversed(list(zip(slices(dy.shape[1], ctx.chunk), borders, strict=True))):
            inputs = [x.detach().requires_grad_() for x in (*(x[:, part] for x in sequences), *shared, before)]
            with torch.enable_grad():
                outputs = ctx.step(*inputs[:-1], _documents(starts, part), inputs[-1])
            *own, carry = torch.autograd.grad(outputs, inputs, (dy[:, part].to(outputs[0].dtype), carry))
            for whole, piece in zip(grads, own[:count], strict=True):
                whole[:, part] = piece
            for whole, piece in zip(sums, own[count:], strict=True):
                whole += piece
        return None, None, None, None, None, *grads, *sums


def _documents(starts: Tensor | None, part: slice) -> Tensor | None:
    return None if starts is None else starts[:, part].cumsum(1)
