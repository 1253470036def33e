"""Mistakes in mixtures of experts, between tensor- and expert-parallel ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.layers.carry import Carry
from megatron.layers.moe import capacity, losses
from megatron.layers.moe import layer as moe_layer
from megatron.layers.moe.dispatch import LocalDispatch
from megatron.layers.moe.layer import MixtureOfExperts
from megatron.model.head import LMOutput
from megatron.mpu.exchange import Exchange, _Exchanged
from megatron.mpu.state import ParallelState
from megatron.training.engine_update import is_owned
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

TP = Layout(tp=2)
EP = Layout(dp=4, ep=2, micro=1)
EXPERT = "gradient of 3.mlp.experts.linear1"


def _reduction(mutated: Any) -> Any:
    return mock.patch.object(DeepSpeedEngine, "_reduce_expert_gradients", mutated)


@mutant("moe", EP, EXPERT, engines="deepspeed")
def drop_expert_reduction() -> Any:
    """Each rank steps on what its own group's tokens say to its experts (undivided, too)."""
    return _reduction(lambda self, grads, size: None)


@mutant("moe", EP, EXPERT, engines="deepspeed")
def divide_by_ranks_that_hold_the_same() -> Any:
    """The mean over the ranks that were reduced, as if an expert's gradient came from one rank's tokens."""

    def reduced(self: Any, grads: dict[str, list[Tensor]], size: int) -> None:
        for name, tensors in grads.items():
            self.allreduce_no_retain(tensors, self.expert_data_parallel_group[name], size)

    return _reduction(reduced)


@mutant("moe", EP, EXPERT, engines="deepspeed")
def reduce_experts_over_all_data_ranks() -> Any:
    """Different experts' gradients are added up as if they were one's."""

    def reduced(self: Any, grads: dict[str, list[Tensor]], size: int) -> None:
        for tensors in grads.values():
            self.allreduce_no_retain(tensors, self.data_parallel_group, size)

    return _reduction(reduced)


@mutant("moe", EP, "weight of 3.mlp.experts.linear1", engines="deepspeed")
def experts_look_replicated() -> Any:
    """DeepSpeed is not told: it averages experts with others', and gives every rank the first one's at the start."""
    return mock.patch("megatron.training.engine_experts.spec_of", lambda p: mock.Mock(experts=False))


@mutant("moe", EP, "gradient norm", engines="deepspeed")
def norm_of_own_experts() -> Any:
    """The gradient norm holds the experts of one rank of the group "expert" only."""

    def own(x: Tensor, state: ParallelState, *partitioned: bool) -> Tensor:
        if (group := state.group("model_pipe")) is not None:
            dist.all_reduce(x, group=group)
        return x

    return mock.patch("megatron.training.engine_update.sum_owned", own)


@mutant("moe", EP, "gradient norm", engines="deepspeed")
def dense_counted_by_every_expert_rank() -> Any:
    """Parameters that are not experts count once per rank of the group "expert"."""

    def owned(spec: Any, state: ParallelState, *partitioned: bool) -> bool:
        return is_owned(spec, mock.Mock(wraps=state, tp_rank=state.tp_rank, is_first_stage=True, ep_rank=0))

    return mock.patch("megatron.training.engine_update.is_owned", owned)


@mutant("moe", EP, "weight of 3.mlp.experts.linear1")
def experts_numbered_per_rank() -> Any:
    """Every rank's first expert is number 0 when they are drawn."""
    return mock.patch("megatron.mpu.initial_weights.first_expert", lambda experts, state: 0)


@mutant("moe", EP, EXPERT)
def rows_stay_sorted_by_rank() -> Any:
    """Rows are handed to the experts in the order in which they came."""

    def unsorted(self: Exchange, rows: Tensor) -> Tensor:
        return _Exchanged.apply(rows, self.send, self.receive, self.state)

    return mock.patch.object(Exchange, "to_experts", unsorted)


@mutant("moe", EP, "loss")
def rows_come_back_sorted_by_expert() -> Any:
    """Outputs are sent back in the order of the experts, not of the ranks that asked."""

    def unsorted(self: Exchange, rows: Tensor) -> Tensor:
        return _Exchanged.apply(rows, self.receive, self.send, self.state)

    return mock.patch.object(Exchange, "from_experts", unsorted)


# -- under tensor parallelism alone ----------------------------------------------------------------------------------


@mutant("moe", TP, "gradient of 3.mlp.router.weight")
def router_gradient_of_own_experts() -> Any:
    """The router keeps the gradient of this rank's experts' weights: copies drift apart (torchtitan)."""
    return mock.patch("megatron.layers.moe.router.sum_gradient", lambda w, state, inside=None: w)


@mutant("moe", TP, "gradient of 3.mlp.shared_expert_gate.weight")
def gate_gradient_of_own_columns() -> Any:
    """The gate of the shared expert keeps the gradient of this rank's part of it (Pai-Megatron)."""
    return mock.patch.object(moe_layer, "sum_gradient", lambda w, state, inside=None: w)


@mutant("moe", TP, "gradient of 3.mlp.router.weight")
def balance_loss_of_every_rank() -> Any:
    """What all ranks compute alike is added to the loss by each: its gradient counts tp times (Megatron)."""
    return mock.patch.object(moe_layer, "count_once", lambda x, state: x)


@mutant("moe", TP, "gradient of 3.mlp.router.weight")
def balance_loss_divided_twice() -> Any:
    """The loss of balance is divided by tp where its gradient was already counted once."""
    count_once = moe_layer.count_once
    return mock.patch.object(moe_layer, "count_once", lambda x, state: count_once(x, state) / state.tp_size)


@mutant("moe", TP, "loss")
def experts_start_at_zero_on_every_rank() -> Any:
    """Every rank takes the assignments to the first experts for its own."""
    return mock.patch.object(
        moe_layer, "build_dispatch", lambda experts, state: LocalDispatch(0, experts // state.tp_size, experts)
    )


@mutant("moe", Layout(micro=2), "gradient of 3.mlp.router.weight")
def balance_over_the_micro_batch() -> Any:
    """The loss of balance takes all sequences of a micro-batch together: it depends on how a batch is split."""
    return mock.patch.object(
        moe_layer, "balance_loss", lambda shares, chosen, b: losses.balance_loss(shares, chosen, 1)
    )


@mutant("moe", Layout(pp=2), "gradient of 3.mlp.router.weight")
def balance_not_added() -> Any:
    """The loss of balance is computed and never reaches the loss (Automodel: its result was thrown away)."""
    replace_hidden = Carry.replace_hidden
    return mock.patch.object(Carry, "replace_hidden", lambda self, hidden, loss=None: replace_hidden(self, hidden))


@mutant("moe", TP, "loss")
def shared_expert_on_every_rank() -> Any:
    """The shared expert's whole output is added on every rank before the sum."""
    original = MixtureOfExperts.__init__

    def init(self: MixtureOfExperts, *arguments: Any) -> None:
        original(self, *arguments)
        assert self.shared_expert is not None
        forward = self.shared_expert.forward

        def whole(x: Tensor, entered: bool = False, reduce: bool = True) -> Any:
            return forward(x, entered=entered, reduce=True)

        self.shared_expert.forward = whole  # type: ignore[method-assign, assignment]

    return mock.patch.object(MixtureOfExperts, "__init__", init)


@mutant("moe", Layout(dp=2, micro=1), "gradient of 3.mlp.router.weight")
def balance_loss_per_token_of_the_batch() -> Any:
    """The loss of balance is weighed as the loss of tokens is: it depends on how many of them a rank trains."""

    def weighed(self: LMOutput, loss: Tensor) -> Tensor:
        share = loss.detach()
        return loss if self.balance is None else loss + (self.balance - self.balance.detach()) * share

    return mock.patch.object(LMOutput, "with_balance", weighed)


@mutant("moe-documents", Layout(dp=2, micro=4), "loss")
def capacity_of_the_micro_batch() -> Any:
    """Experts are full when the micro-batch's share is reached: what is dropped depends on what else is in it."""

    def whole(chosen: Tensor, sequence: Tensor, experts: int, factor: float) -> Tensor:
        return capacity.within_capacity(chosen, torch.zeros_like(sequence), experts, factor)

    return mock.patch.object(moe_layer, "within_capacity", whole)


@mutant("moe", Layout(dp=2, ep=2), EXPERT)
def gradient_of_sent_rows_lost() -> Any:
    """The backward pass of the exchange sends gradients the way the rows went, not back."""
    forward = _Exchanged.forward

    def back(ctx: Any, grad: Tensor) -> Any:
        return torch.zeros(sum(ctx.back[1]), grad.shape[1]), None, None, None

    assert forward is not None
    return mock.patch.object(_Exchanged, "backward", staticmethod(back))
