"""Which assignments of tokens to experts are dropped when an expert is full (`moe_capacity_factor`).

Legend: b sequences, s tokens of each, t = b·s, k experts per token, E experts.

An expert takes ⌈factor · s · k / E⌉ tokens of each sequence, first come first served. Counted per sequence and in the
order of the tokens, a drop depends neither on what else is in the micro-batch nor on later tokens: other splits of the
batch drop the same, and nothing leaks from the future.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def capacity(factor: float, length: int, choices: int, experts: int) -> int:
    """Tokens that an expert takes of a sequence of `length`, at least 1."""
    return max(1, math.ceil(factor * length * choices / experts))


def within_capacity(chosen: Tensor, sequences: int, experts: int, factor: float) -> Tensor:
    """chosen [t, k] int64, `sequences` b -> bool [t, k]: which assignments find room."""
    tokens, choices = chosen.shape
    most = capacity(factor, tokens // sequences, choices, experts)
    row = torch.arange(sequences, device=chosen.device).repeat_interleave(tokens // sequences).unsqueeze(1)
    bucket = (row * experts + chosen).reshape(-1)
    order = bucket.argsort(stable=True)
    sizes = torch.zeros(sequences * experts, dtype=torch.int64, device=chosen.device)
    sizes.scatter_add_(0, bucket, torch.ones_like(bucket))
    first = (sizes.cumsum(0) - sizes)[bucket[order]]
    place = torch.empty_like(bucket)
    place[order] = torch.arange(bucket.shape[0], device=chosen.device) - first
    return (place < most).view_as(chosen)
