"""What DeepSpeed needs around a model, without its compiler and its output."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine_config import deepspeed_config, effective_zero_stage


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
