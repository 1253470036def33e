"""Mistakes on purpose in expert parallelism; the tests of it must see each."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.mpu.exchange import Exchange
from megatron.mpu.state import ParallelState
from tests.training.test_expert_parallel import train
from tests.training.tiny import Layout


def _reduction(mutated: Any) -> Any:
    return mock.patch.object(DeepSpeedEngine, "_reduce_expert_gradients", mutated)


def drop_expert_reduction() -> Any:
    """Each rank steps on what its own group's tokens say to its experts (undivided, too)."""
    return _reduction(lambda self, grads, size: None)


def divide_by_ranks_that_hold_the_same() -> Any:
    """The mean over the ranks that were reduced, as if an expert's gradient came from one rank's tokens."""

    def reduced(self: Any, grads: dict[str, list[Tensor]], size: int) -> None:
        for name, tensors in grads.items():
            self.allreduce_no_retain(tensors, self.expert_data_parallel_group[name], size)

    return _reduction(reduced)


def reduce_over_all_data_ranks() -> Any:
    """Different experts' gradients are added up as if they were one's."""

    def reduced(self: Any, grads: dict[str, list[Tensor]], size: int) -> None:
        for tensors in grads.values():
            self.allreduce_no_retain(tensors, self.data_parallel_group, size)

    return _reduction(reduced)


def experts_look_replicated() -> Any:
    """DeepSpeed is not told: it averages experts with others', and gives every rank the first one's at the start."""
    return mock.patch("megatron.training.engine_experts.spec_of", lambda p: mock.Mock(experts=False))


def norm_of_own_experts() -> Any:
    """The gradient norm holds the experts of one rank of the group "expert" only."""

    def own(x: Tensor, state: ParallelState) -> Tensor:
        if (group := state.group("model_pipe")) is not None:
            dist.all_reduce(x, group=group)
        return x

    return mock.patch("megatron.training.engine_update.sum_owned", own)


def dense_counted_by_every_expert_rank() -> Any:
    """Parameters that are not experts count once per rank of the group "expert"."""
    from megatron.training.engine_update import is_owned

    def owned(spec: Any, state: ParallelState) -> bool:
        return is_owned(spec, mock.Mock(wraps=state, tp_rank=state.tp_rank, is_first_stage=True, ep_rank=0))

    return mock.patch("megatron.training.engine_update.is_owned", owned)


def experts_numbered_per_rank() -> Any:
    """Every rank's first expert is number 0 when they are drawn."""
    return mock.patch("megatron.mpu.initial_weights.first_expert", lambda experts, state: 0)


def rows_stay_sorted_by_rank() -> Any:
    """Rows are handed to the experts in the order in which they came."""
    return mock.patch.object(Exchange, "to_experts", _unsorted)


def _unsorted(self: Exchange, rows: Tensor) -> Tensor:
    from megatron.mpu.exchange import _Exchanged

    return _Exchanged.apply(rows, self.send, self.receive, self.state)


MUTATIONS = (
    drop_expert_reduction,
    divide_by_ranks_that_hold_the_same,
    reduce_over_all_data_ranks,
    experts_look_replicated,
    norm_of_own_experts,
    dense_counted_by_every_expert_rank,
    experts_numbered_per_rank,
    rows_stay_sorted_by_rank,
)


def train_mutated(rank: int, world: int, name: str, keys: dict[str, Any], layout: Layout, steps: int) -> Any:
    """`test_expert_parallel.train` with one mistake in place."""
    mutate = next(mutation for mutation in MUTATIONS if mutation.__name__ == name)
    with mutate():
        return train(rank, world, keys, layout, steps)
