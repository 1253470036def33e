"""Which assignments of tokens to experts are dropped when an expert is full (`moe_capacity_factor`).

Legend: t tokens, k experts per token, E experts.

An expert takes ⌈factor · s · k / E⌉ tokens of each sequence of s tokens, first come first served; where packed
documents are kept apart (intra_document_masking), of each document. Counted so, and in the order of the tokens, a drop
depends neither on what else is in the micro-batch nor on other documents nor on later tokens: other splits of the batch
drop the same, and nothing leaks from the future.
"""

from __future__ import annotations

import torch
from torch import Tensor


def capacity(factor: float, lengths: Tensor, choices: int, experts: int) -> Tensor:
    """Tokens that an expert takes of sequences of `lengths`, at least 1; int64."""
    return (factor * lengths.double() * choices / experts).ceil().long().clamp(min=1)


def within_capacity(chosen: Tensor, sequence: Tensor, experts: int, factor: float) -> Tensor:
    """chosen [t, k] int64 and the sequence (or document) of each token, int64 [t], ascending from 0
    -> bool [t, k]: which assignments find room. Does not wait for the device."""
    lengths = torch.zeros_like(sequence).scatter_add_(0, sequence, torch.ones_like(sequence))
    most = capacity(factor, lengths[sequence], chosen.shape[1], experts)
    bucket = (sequence.unsqueeze(1) * experts + chosen).reshape(-1)
    ordered, order = bucket.sort(stable=True)
    place = torch.empty_like(bucket)
    first = torch.searchsorted(ordered, ordered)
    place[order] = torch.arange(len(bucket), device=bucket.device) - first
    return place.view_as(chosen) < most.unsqueeze(1)
