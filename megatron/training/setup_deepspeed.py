"""A model and its engine with DeepSpeed, and what DeepSpeed needs around them, without its compiler and its output.

With `engine: native` nobody imports this, nor DeepSpeed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from megatron.model.gpt import Layer
from megatron.model.pipe import LayerPipe, SequentialModel
from megatron.mpu.state import ParallelState, rank_lists
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import Objective
from megatron.training.engine_bf16 import cut_groups
from megatron.training.engine_config import deepspeed_config, effective_zero_stage, owns_reduction
from megatron.training.engine_deepspeed import DeepSpeedEngine
from megatron.training.engine_experts import split_expert_groups


def init_deepspeed(device: torch.device) -> None:
    """DeepSpeed's own view of an initialised torch.distributed, without its compiler and its chatter."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # DeepSpeed would compile a C++ op with g++ on first use, and a build killed half-way hangs every later run.
        # Not by attribute: reading it makes DeepSpeed probe all its operators, with a compiler.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """DeepSpeed prints layer tables and the like with plain print(); results alone belong on stdout."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def lend_groups(state: ParallelState, timeout: timedelta | None = None) -> None:
    """Have DeepSpeed, which asks for process groups in many places, use ours from now on: a second one of the same
    ranks is a second communicator, with buffers on every GPU.

    Args:
        timeout: of a group that we have not got; None: torch's default.
    """
    deepspeed.comm.comm.cdb.new_group = _LentGroups(state, timeout)


class _LentGroups:
    """In place of `new_group`: like it, to be called with the same ranks on all ranks, in the same order."""

    def __init__(self, state: ParallelState, timeout: timedelta | None) -> None:
        self._state, self._timeout = state, timeout
        lists = rank_lists(state.topology, state.ep_size)
        self._names = {ranks: name for name, several in lists.items() for ranks in several if len(ranks) > 1}
        self._alone: dist.ProcessGroup | None = None

    def __call__(self, ranks: Iterable[int]) -> Any:
        """The group of these ranks, or torch's sign that this rank is not one of them."""
        wanted, rank, groups = tuple(sorted(ranks)), self._state.rank, self._state.groups
        if len(wanted) == self._state.topology.world_size:
            return dist.group.WORLD
        if len(wanted) > 1 and wanted not in self._names:  # of two stages that share a weight, among more
            self._names[wanted] = str(wanted)
            made = dist.new_group(list(wanted), self._timeout)
            if rank in wanted:
                groups[str(wanted)] = made
        if rank not in wanted:
            return dist.GroupMember.NON_GROUP_MEMBER
        return groups[self._names[wanted]] if len(wanted) > 1 else self._of_one()

    def _of_one(self) -> dist.ProcessGroup:
        """A group of this rank alone, of which the others need not know."""
        self._alone = self._alone or dist.new_group([self._state.rank], use_local_synchronization=True)
        return self._alone


def grid_of(state: ParallelState) -> PipelineParallelGrid | None:
    """DeepSpeed's view of the groups of a layout without pipeline stages (a pipeline module brings its own)."""
    if state.pp_size > 1:
        return None
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=state.tp_size, num_dp=state.dp_size)
    with quiet_stdout():
        return PipelineParallelGrid(topology=topology)


def layer_partitioner(args: NeoXArgs, state: ParallelState) -> Callable[[torch.nn.Module], object] | None:
    """Under ZeRO-3: a function that partitions a layer's parameters, called before the next layer is built."""
    group = state.group("data")
    if effective_zero_stage(args) < 3 or group is None:
        return None
    # DeepSpeed would check the batch sizes against the whole world here, tensor-parallel ranks included.
    kept = ("zero_optimization", "bf16", "fp16")
    config = {"train_micro_batch_size_per_gpu": 1, **{k: v for k, v in deepspeed_config(args).items() if k in kept}}
    dtype = {"bfloat16": torch.bfloat16, "fp16": torch.float16}.get(args.optimizer.precision or "", torch.float32)

    def partition(layer: torch.nn.Module) -> None:
        for p in layer.parameters():
            p.data = p.data.to(dtype)  # the engine does not cast what is partitioned
        deepspeed.zero.Init(module=layer, data_parallel_group=group, config_dict_or_path=config)

    return partition


def build_deepspeed_model(
    args: NeoXArgs,
    state: ParallelState,
    layers: Sequence[Layer],
    objective: Objective,
    seed: int | None,
    timeout: timedelta | None,
) -> SequentialModel | LayerPipe:
    """See `setup.build_model`; `timeout`: see `lend_groups`."""
    lend_groups(state, timeout)
    with quiet_stdout():
        if state.pp_size > 1:
            return LayerPipe(layers, objective, args.parallel.pipe_partition_method, seed, state)
        return SequentialModel(layers, objective, seed, state, layer_partitioner(args, state))


def build_deepspeed_engine(
    args: NeoXArgs,
    state: ParallelState,
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    stage: int,
) -> DeepSpeedEngine:
    """The DeepSpeed engine around the model, with the optimizer that `build` makes of its groups."""
    if state.ep_size > 1:
        groups = split_expert_groups(groups)
    config = deepspeed_config(args)
    if owns_reduction(config):
        tied = [w for w, _ in model.get_tied_weights_and_groups()] if isinstance(model, LayerPipe) else []
        asked = config["zero_optimization"].get("reduce_bucket_size")
        groups = cut_groups(groups, model.parameters(), state, tied, asked)
    with quiet_stdout():
        return DeepSpeedEngine(
            model,
            build(groups),
            config,
            state,
            stage=stage,
            precision=args.optimizer.precision,
            max_norm=args.optimizer.gradient_clipping,
            grid=grid_of(state),
        )
