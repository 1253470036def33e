"""Activation checkpointing: what a block keeps for the backward pass, and what it computes again.

| policy    | kept                                        | computed again in backward        |
|-----------|---------------------------------------------|-----------------------------------|
| none      | everything autograd asks for                | nothing                           |
| full      | the chunk's input                           | the whole chunk                   |
| selective | also results of matrix products, attention  | norms, activations, residual adds |

A chunk is `checkpoint_num_layers` consecutive blocks. torch's non-reentrant checkpoint does the work; it restores the
random state, so dropout draws the same masks again and losses do not change by a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron.errors import UserError
from megatron.layers import attention_packed  # defines one of the operators below
from megatron.layers.moe import grouped_linear  # and another

if TYPE_CHECKING:
    from torch._ops import OperatorBase

    from megatron.neox_arguments.schema_model import ModelConfig

POLICIES = ("none", "full", "selective")

assert attention_packed and grouped_linear
_aten = torch.ops.aten
# Dear to compute, and the rest of a block follows from them cheaply.
SAVED_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._grouped_mm.default,
        torch.ops.deepy.grouped_linear.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._flash_attention_forward.default,
        torch.ops.deepy.packed_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
)


@dataclass(frozen=True)
class Recompute:
    """`policy` (one of POLICIES) for chunks of `every` blocks."""

    policy: str = "none"
    every: int = 1

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UserError(f"checkpoint_policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        if self.every < 1:
            raise UserError(f"checkpoint_num_layers: {self.every} blocks per chunk; it must be at least 1")

    @classmethod
    def of(cls, model: ModelConfig) -> Recompute:
        """From checkpoint_policy, or from checkpoint_activations when no policy is given."""
        policy = model.checkpoint_policy or ("full" if model.checkpoint_activations else "none")
        return cls(policy, model.checkpoint_num_layers)

    @property
    def active(self) -> bool:
        return self.policy != "none"


def recompute_of(layers: Iterable[Any]) -> Recompute:
    """The recomputation for which the blocks among these layers were built."""
    return next((layer.chunking for layer in layers if hasattr(layer, "chunking")), Recompute())


# Operators that exist only once something imported them; the object itself would have to be imported too.
SAVED_NAMES = frozenset(
    {
        "torch_attn::_varlen_attn",
        "flex_attention",
        # The flash-attn package from 2.7 on; what older ones compute is hidden from torch, and computed again.
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)


def keep_or_recompute(context: Any, operator: OperatorBase, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy "selective", as torch asks for it: of every operator that a chunk calls."""
    saved = operator in SAVED_OPERATORS or operator.name() in SAVED_NAMES
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_in_backward(function: Callable[..., Any], policy: str, *args: Any) -> Any:
    """function(*args) under `policy`; a plain call where no gradient is recorded."""
    if policy == "none" or not torch.is_grad_enabled():
        return function(*args)
    if policy == "selective":
        contexts = partial(create_selective_checkpoint_contexts, keep_or_recompute)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return checkpoint(function, *args, use_reentrant=False)
