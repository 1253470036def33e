"""GPT-NeoX's balanced assignment: router scores made into a matrix whose experts all get the same share.

Legend: t tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 3
_EPSILON = 1e-8  # keeps a division by an underflowed sum finite, as in GPT-NeoX


@torch.no_grad()
def sinkhorn(logits: Tensor) -> Tensor:
    """logits [t, E] -> [t, E] fp32: exp(logits) with rows and columns scaled in turn, `ITERATIONS` times, so that
    every row sums to about 1/t and every column to 1/E.

    Sinkhorn & Knopp 1967. GPT-NeoX stops after three rounds or when nothing changes any more; its fork's test is the
    wrong way round, so that it stops after the first. Here there are always three: a test would wait for the device.
    Rows are shifted by their maximum first, which the scaling undoes, so that no exponential overflows.
    """
    logits = logits.float()
    cost = (logits - logits.amax(dim=1, keepdim=True)).exp()
    tokens, experts = cost.shape
    per_expert = torch.ones(experts, device=cost.device)
    per_token = torch.ones(tokens, device=cost.device)
    for _ in range(ITERATIONS):
        per_token = 1.0 / (tokens * (cost @ per_expert + _EPSILON))
        per_expert = 1.0 / (experts * (per_token @ cost + _EPSILON))
    return per_token.unsqueeze(1) * cost * per_expert
