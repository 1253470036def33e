"""T5's relative positions: a learned number per bucket of distances and head, added to the attention scores.

Legend: n heads, /tp = this rank's part, s queries, s_k keys (the queries are the last s of the keys).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layers.positions import POSITIONS, PositionScheme
from megatron.mpu import sharding
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class RelativePositions(nn.Module):
    """The one table of all layers, `weight` [buckets, n/tp], times the square root of the head width, as in GPT-NeoX:
    it is added to scores that are divided by it."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.scale = float(model.head_dim) ** 0.5
        spec = ParamSpec(
            shape=(model.rpe_num_buckets, model.num_attention_heads), init=_xavier, split_dim=1, kind="embedding"
        )
        self.weight = sharding.parameter(spec, state)

    def forward(self) -> Tensor:
        return self.weight * self.scale


def _xavier(full: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_normal_(full, generator=generator)


def distance_buckets(length: int, buckets: int, reach: int, device: torch.device) -> Tensor:
    """[length] int64: the bucket of the distances 0, 1, ... (Raffel et al. 2019, arXiv 1910.10683, causal).

    The first half has a bucket each; the others grow with the logarithm up to `reach`, behind which all is the last.
    In fp32 in GPT-NeoX's order of operations, because a rounding decides on which side of a border a distance is.
    """
    distance = torch.arange(length, device=device)
    exact = buckets // 2
    far = (distance.clamp(min=1).float() / exact).log() / math.log(reach / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + far.long()).clamp(max=buckets - 1))


def score_bias(model: ModelConfig, table: Tensor, s: int, s_k: int) -> Tensor:
    """table [buckets, n/tp] -> [1, n/tp, s, s_k]; keys behind their query, which are masked, have distance 0."""
    device = table.device
    by_distance = F.embedding(distance_buckets(s_k, len(table), model.rpe_max_distance, device), table)
    query = torch.arange(s_k - s, s_k, device=device).unsqueeze(1)
    distance = (query - torch.arange(s_k, device=device)).clamp(min=0)
    return F.embedding(distance, by_distance).permute(2, 0, 1).unsqueeze(0)


POSITIONS.register(
    "rpe",
    table=("rpe_num_buckets", "num_attention_heads"),
    doc="T5's learned bias per head and bucket of distances, one table for all layers.",
)(PositionScheme(shared=RelativePositions, score_bias=score_bias))
