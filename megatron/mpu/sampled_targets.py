"""Targets drawn from the model's own distribution, the same at every layout.

Legend: t = b·s tokens, c tokens of one chunk, h hidden, v vocabulary, /tp = this rank's part.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from megatron.mpu.collectives import all_gather, all_reduce, enter_tensor_parallel
from megatron.mpu.cross_entropy import Projection, Shard, chunks
from megatron.mpu.random import stable_seed

_CHUNK = 512  # tokens: probabilities are added up in fp64


def draws(tokens: Tensor, step: int) -> Tensor:
    """Uniform numbers in [0, 1) for tokens [..., s] int64 on the CPU, fp32.

    Those of a row depend on the step and on what it holds, not on which rank has it.
    """
    found = torch.empty(tokens.shape)
    rows = tokens.reshape(-1, tokens.shape[-1])
    for row, drawn in zip(rows, found.view(rows.shape), strict=True):
        generator = torch.Generator().manual_seed(stable_seed("targets", step, zlib.crc32(row.numpy().tobytes())))
        drawn.copy_(torch.rand(len(row), generator=generator))
    return found


@torch.no_grad()
def sampled_targets(
    hidden: Tensor, weight: Tensor, drawn: Tensor, projection: Projection, bias: Tensor | None = None
) -> Tensor:
    """The first token whose cumulative probability is above `drawn` [t], for hidden [t, h] ([t/tp, h] under sequence
    parallelism) and weight [v/tp, h]: [t] int64, the same on all tensor-parallel ranks."""
    state = projection.state
    own = replace(Shard.of(weight.shape[0], projection), compiled=False)
    hidden = enter_tensor_parallel(hidden, state)
    found = torch.zeros(drawn.shape, dtype=torch.int64, device=drawn.device)
    for part in chunks(len(drawn), min(projection.chunk, _CHUNK)):
        logits = own.logits(hidden[part], weight, bias).double()
        log_sums = torch.logsumexp(logits, -1)[None]
        if state.tp_size > 1:
            log_sums = all_gather(log_sums, state)
        ends = (log_sums - torch.logsumexp(log_sums, 0)).exp().cumsum(0)  # of the ranks' parts of the vocabulary
        wanted = drawn[part].double() * ends[-1]
        owner = (wanted >= ends).sum(0)
        if own.rows:
            before = ends[state.tp_rank] - (log_sums[state.tp_rank] - torch.logsumexp(log_sums, 0)).exp()
            reached = (logits - torch.logsumexp(log_sums, 0)[:, None]).exp().cumsum(-1) + before[:, None]
            index = torch.searchsorted(reached, wanted[:, None], right=True)[:, 0].clamp(max=own.rows - 1)
            found[part] = torch.where(owner == state.tp_rank, own.start + index, 0)
    return found if state.tp_size == 1 else all_reduce(found, state)
