"""Mistakes on purpose. Each one is a bug that a real trainer has shipped; the invariance tests must see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

from tests.training.tiny import Layout, train


def drop_tensor_parallel_reduction() -> Any:
    """A row-parallel output that is not summed over tensor-parallel ranks."""
    return mock.patch("megatron.model.block.leave_tensor_parallel", lambda x, state: x)


def tied_weight_counted_twice() -> Any:
    """Both copies of a tied embedding enter the gradient norm."""
    return mock.patch("megatron.training.engine_update.is_owned", lambda spec, state: True)


replicated_parameters_counted_on_every_rank = tied_weight_counted_twice


def seed_per_rank() -> Any:
    """Every tensor-parallel rank draws its own weights."""
    from megatron.mpu import initial_weights

    original = initial_weights._initial_shard
    return mock.patch.object(
        initial_weights,
        "_initial_shard",
        lambda spec, key, seed, state: original(spec, key, seed + state.tp_rank, state),
    )


def mean_of_means() -> Any:
    """Each data rank divides by its own number of trained tokens."""
    from megatron.training.engine_deepspeed import DeepSpeedEngine

    def local_count(self: Any, batch: Any, votes: Sequence[bool] = ()) -> list[int]:
        return [int(batch.mask.sum()) * self.state.dp_size, 0, *votes]

    return mock.patch.object(DeepSpeedEngine, "_counts", local_count)


def forget_sequence_parallel_norm_gradients() -> Any:
    """Norm weights keep the gradient of their own slice of the sequence."""
    return mock.patch("megatron.layers.norms.sum_gradient", lambda w, state, region=None: w)


def padding_in_the_softmax() -> Any:
    """Padded vocabulary rows take part in the softmax."""
    from megatron.mpu.cross_entropy import _Shard

    def whole(cls: type[_Shard], local_size: int, projection: Any) -> _Shard:
        state = projection.state
        return cls(state.tp_rank * local_size, local_size, state, projection.compiled, projection.softcap)

    return mock.patch.object(_Shard, "of", classmethod(whole))


def drop_data_parallel_reduction() -> Any:
    """Each data rank steps on the gradient of its own samples."""
    from megatron.training.engine_deepspeed import DeepSpeedEngine

    original = DeepSpeedEngine.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.deepspeed.enable_backward_allreduce = False

    return mock.patch.object(DeepSpeedEngine, "__init__", init)


def drop_tied_reduction() -> Any:
    """The two copies of a tied weight keep gradients of their own."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ReduceTiedGrads: lambda self: None})


def train_mutated(rank: int, world: int, mutation: str, keys: dict[str, Any], layout: Layout, steps: int) -> Any:
    """`tiny.train` with one mistake in place."""
    torch.manual_seed(0)
    with globals()[mutation]():
        return train(rank, world, keys, layout, steps)
