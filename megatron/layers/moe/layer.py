"""A mixture-of-experts feed-forward.

Legend: b sequences, s tokens of each, t = b·s, h hidden, k experts per token, E experts, /tp = this rank's part.

y = Σ_j weight_j · expert_j(x) over a token's k experts (+ gate(x) · shared_expert(x)).

The whole layer is inside the tensor-parallel region: every rank has all tokens, works with its own experts (and its
part of the shared one) and returns a partial sum, so it takes the same two crossings as a dense feed-forward, with and
without sequence parallelism. Whatever all ranks compute alike there has a gradient that is summed over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.layers.carry import Context
from megatron.layers.documents import Documents, document_of_tokens
from megatron.layers.init import build_init
from megatron.layers.mlp import DenseMLP
from megatron.layers.moe.capacity import within_capacity
from megatron.layers.moe.dispatch import build_dispatch
from megatron.layers.moe.expert_load import Load
from megatron.layers.moe.experts import Experts
from megatron.layers.moe.losses import balance_loss, z_loss
from megatron.layers.moe.permute import combine_rows, gather_rows
from megatron.layers.moe.router import Router, Routing
from megatron.layers.parts import MLPS, FeedForward
from megatron.mpu import sharding
from megatron.mpu.collectives import count_once, enter_tensor_parallel, leave_tensor_parallel, sum_gradient
from megatron.mpu.layers import linear
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class SharedExpertGate(nn.Module):
    """sigmoid(x · weight): how much of the shared expert each token takes. `weight` [1, h]."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.weight = sharding.parameter(ParamSpec(shape=(1, model.hidden_size), init=build_init(model)), state)

    def forward(self, x: Tensor) -> Tensor:
        """[t, h], inside the tensor-parallel region -> [t, 1]."""
        return linear(x, sum_gradient(self.weight, self.state, inside="tensor")).sigmoid()


@MLPS.register("moe")
class MixtureOfExperts(FeedForward):
    """Router, experts, and a shared expert if there is one. See the module's text."""

    uncompiled = ("forward",)  # the experts' rows depend on the data
    elementwise = ("gather", "combine")

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.num_experts = model.moe_num_experts
        self.capacity_factor = model.moe_capacity_factor
        self.balance_coefficient, self.z_coefficient = model.moe_aux_loss_coeff, model.moe_z_loss_coeff
        self.router = Router(model, state)
        self.experts = Experts(model, state)
        self.shared_expert = self.shared_expert_gate = None
        if model.moe_shared_expert_size:
            self.shared_expert = DenseMLP(model, state, width=model.moe_shared_expert_size, bias=False)
            self.shared_expert_gate = SharedExpertGate(model, state) if model.moe_shared_expert_gate else None
        self.dispatch = build_dispatch(model.moe_num_experts, state)
        self.gather, self.combine = gather_rows, combine_rows
        self.load = Load(model.moe_num_experts, state.device)

    @staticmethod
    def adds_loss(model: ModelConfig) -> bool:
        return model.moe_aux_loss_coeff + model.moe_z_loss_coeff > 0

    def forward(
        self, x: Tensor, context: Context, *, entered: bool = False, reduce: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        sequences = context.positions.shape[0]
        if not entered:
            x = enter_tensor_parallel(x, self.state)
        routing = Routing(*self.router(x))
        keep = None
        if self.capacity_factor is not None and self.training:
            sequence = _sequence_of_tokens(len(x), sequences, context.documents, x.device)
            keep = within_capacity(routing.experts, sequence, self.num_experts, self.capacity_factor)
        loss, weights = self._losses(routing, keep, sequences)
        route = self.dispatch(routing.experts, keep)
        rows = self.experts(route.to_experts(self.gather(x, route.order)), route.groups)
        y = self.combine(route.from_experts(rows), weights, route.order)
        if self.shared_expert is not None:
            shared = self.shared_expert(x, entered=True, reduce=False)[0]
            y = y + (shared if self.shared_expert_gate is None else shared * self.shared_expert_gate(x))
        return (leave_tensor_parallel(y, self.state) if reduce else y), loss

    def _losses(self, routing: Routing, keep: Tensor | None, sequences: int) -> tuple[Tensor | None, Tensor]:
        """(The weighted balance and z-loss, the weights [t, k] watched for `load`)."""
        balance = balance_loss(routing.shares, routing.experts, sequences) if self.balance_coefficient else None
        z = z_loss(routing.logits) if self.z_coefficient else None
        weights = self.load.watch(routing.weights, routing.experts, keep, balance, z)
        parts = [c * x for c, x in ((self.balance_coefficient, balance), (self.z_coefficient, z)) if x is not None]
        return (count_once(sum(parts[1:], parts[0]), self.state) if parts else None), weights

    def add_bias(self, total: Tensor) -> Tensor:
        return total  # an expert's bias is part of its output


def _sequence_of_tokens(tokens: int, sequences: int, documents: Documents | None, device: torch.device) -> Tensor:
    """int64 [t]: the row of each token, or its document where documents are kept apart, counted from 0."""
    if documents is not None:
        return document_of_tokens(documents.ids)
    return torch.arange(sequences, device=device).repeat_interleave(tokens // sequences)
