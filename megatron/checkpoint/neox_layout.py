"""Our row order in memory ↔ GPT-NeoX's row order on disk, per tensor-parallel rank.

| parameter               | memory                | disk (GPT-NeoX)                                                  |
|-------------------------|-----------------------|------------------------------------------------------------------|
| query_key_value, MHA    | [Q heads | K | V]     | head 0: q k v, head 1: q k v, ...  (as many K/V heads as Q heads) |
| query_key_value, GQA    | [Q heads | K | V]     | the same                                                         |
| mlp.linear1, gated      | [up ; gate]           | the same                                                         |
| padded vocabulary       | padded rows           | the same, and zero                                               |

So one permutation and one clearing are all there is. Legend: n heads, d head size, /tp one rank's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.mpu.sharding import ParamSpec

_FUSED = ("attention.query_key_value.weight", "attention.query_key_value.bias")


class ModelHeads(Protocol):
    """The part of the config group `model` that fixes the row order of fused QKV."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int | None: ...


@dataclass(frozen=True)
class Heads:
    """Number of query heads and of key/value heads of the whole model."""

    num_attention_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, model: ModelHeads) -> Heads:
        """From the config group `model` (derived: `num_kv_heads` is an int)."""
        return cls(model.num_attention_heads, model.num_kv_heads or model.num_attention_heads)

    @property
    def per_head_on_disk(self) -> bool:
        """Whether NeoX stores fused QKV head by head: it does exactly when no K/V head is shared."""
        return self.num_kv_heads == self.num_attention_heads


def to_disk(local: Tensor, spec: ParamSpec, heads: Heads, tp_rank: int, tp_size: int) -> Tensor:
    """One rank's part of a parameter (or of an optimizer moment of its shape) as it is written."""
    if _is_per_head(spec, heads):
        n = heads.num_attention_heads // tp_size
        return local.reshape(3, n, -1, *local.shape[1:]).transpose(0, 1).reshape(local.shape)
    if spec.padded is not None and spec.split_dim is not None:
        real = spec.real_size(tp_rank, tp_size)
        if real < local.shape[spec.split_dim]:
            local = local.clone()
            local.narrow(spec.split_dim, real, local.shape[spec.split_dim] - real).zero_()
    return local


def from_disk(stored: Tensor, spec: ParamSpec, heads: Heads, tp_size: int) -> Tensor:
    """What `to_disk` wrote, back in memory order."""
    if _is_per_head(spec, heads):
        n = heads.num_attention_heads // tp_size
        return stored.reshape(n, 3, -1, *stored.shape[1:]).transpose(0, 1).reshape(stored.shape)
    return stored


def _is_per_head(spec: ParamSpec, heads: Heads) -> bool:
    return heads.per_head_on_disk and spec.name.endswith(_FUSED) and len(spec.blocks) == 3
