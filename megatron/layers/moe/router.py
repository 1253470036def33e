"""Which experts a token goes to, and with which weights.

Legend: t tokens, h hidden, k experts per token (moe_top_k), E experts.

| moe_router_type | chosen                                      | weights                                              |
|-----------------|---------------------------------------------|------------------------------------------------------|
| topk            | k largest scores (+ expert_bias, if any)    | their scores, normalised if asked, times the scaling |
| sinkhorn        | k largest of balanced scores in training,   | sigmoid of the logit for k = 1, else softmax (all)   |
|                 | of plain ones otherwise (GPT-NeoX)          | experts                                              |

Scores are softmax or sigmoid (moe_router_score) of the logits, in fp32 whatever the type of the hidden states. The
layer is inside the tensor-parallel region: every rank routes all tokens and passes on the gradients of its own
experts' weights alone, so the router's weight is summed over ranks in the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megatron.layers.init import build_init
from megatron.layers.moe.sinkhorn import sinkhorn
from megatron.mpu import sharding
from megatron.mpu.collectives import sum_gradient
from megatron.mpu.layers import linear
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Routing(NamedTuple):
    """The router's output.

    * `experts` int64 [t, k] and `weights` fp32 [t, k] of each token. `logits` fp32 [t, E].
    * `shares` fp32 [t, E]: every token's scores, divided by their sum.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor
    shares: Tensor


class Router(nn.Module):
    """`weight` [E, h]; `expert_bias` [E] fp32 with moe_bias_balancing_rate: added to scores where experts are chosen,
    not trained (balancing.py moves it)."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.experts, self.top_k = model.moe_num_experts, model.moe_top_k
        self.balanced = model.moe_router_type == "sinkhorn"
        self.score, self.normalize = model.moe_router_score, model.moe_normalize_topk
        self.scaling, self.jitter = model.moe_routed_scaling, model.moe_jitter_eps or 0.0
        spec = ParamSpec(shape=(self.experts, model.hidden_size), init=build_init(model))
        self.weight = sharding.parameter(spec, state)
        self.expert_bias: nn.Parameter | None = None
        if model.moe_bias_balancing_rate > 0:
            # Its steps are so small that half precision would round them away.
            spec = ParamSpec(shape=(self.experts,), init=sharding.zeros, keep_fp32=True)
            self.expert_bias = sharding.parameter(spec, state)
            self.expert_bias.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [t, h], inside the tensor-parallel region -> the fields of `Routing` as a plain tuple: ZeRO-3 looks for
        tensors in nothing else, and would not gather the weight for the backward pass."""
        if self.training and self.jitter > 0.0:
            x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        weight = sum_gradient(self.weight, self.state, inside="tensor")
        logits = linear(x.float(), weight.float())
        return tuple(self._balanced(logits) if self.balanced else self._largest(logits))

    def _largest(self, logits: Tensor) -> Routing:
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        ranked = scores if self.expert_bias is None else scores + self.expert_bias
        chosen = ranked.detach().topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        if self.scaling != 1.0:
            weights = weights * self.scaling
        shares = scores if self.score == "softmax" else scores / (scores.sum(1, keepdim=True) + 1e-20)
        return Routing(chosen, weights, logits, shares)

    def _balanced(self, logits: Tensor) -> Routing:
        scores = logits.sigmoid() if self.top_k == 1 else logits.softmax(-1)
        ranked = sinkhorn(logits) if self.training else scores.detach()
        chosen = ranked.topk(self.top_k, dim=-1).indices
        return Routing(chosen, scores.gather(1, chosen), logits, logits.softmax(-1))
