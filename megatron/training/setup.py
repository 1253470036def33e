"""From a command line to a process that is ready to train: ranks, devices, model, data, engine.

Below `cluster/`, the only place that reads the environment, and (with the engine) that knows DeepSpeed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from megatron import log
from megatron.errors import DeepyError, LostRankError, UserError
from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe, SequentialModel
from megatron.mpu.random import seed_everything
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import RankInfo, Topology, ranks_from_environment
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.load import load
from megatron.objectives import OBJECTIVES
from megatron.optim.groups import parameter_groups
from megatron.optim.optimizers import build_optimizer
from megatron.optim.schedules import schedule
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.compile import compile_blocks, wants_compile
from megatron.training.engine import DeepSpeedEngine
from megatron.training.engine_config import deepspeed_config, effective_zero_stage
from megatron.training.engine_experts import experts_apart
from megatron.training.rendezvous import make_store, share_config

logger = log.get_logger(__name__)


@dataclass(frozen=True)
class Process:
    """One rank, ready to build things.

    Attributes:
        args: the derived configuration, the same on every rank.
        state: this rank's place in the layout.
        tokenizer: the run's tokenizer.
    """

    args: NeoXArgs
    state: ParallelState
    tokenizer: Tokenizer


def start_process(
    paths: list[str],
    overrides: list[str],
    resolved: str | None,
    prepare: Callable[[NeoXArgs], NeoXArgs] = lambda args: args,
) -> Process:
    """Join the job: agree on the configuration, pick the device, initialise torch.distributed and the groups.

    Args:
        paths, overrides: YAML files and `key=value` given to this rank (torchrun, srun, mpirun).
        resolved: instead of those, the file in which the launcher left the resolved configuration (rank 0 reads it).
        prepare: what the script makes of the configuration before anything is derived (`for_inference`).
    """
    info = ranks_from_environment(os.environ, None if resolved else launcher_preference(paths, overrides))
    level = os.environ.get("LOGLEVEL", "INFO")
    log.configure(info.rank, level)
    store = _store(info)

    def read() -> str:
        args = NeoXArgs.from_resolved(Path(resolved).read_text()) if resolved else load(paths, overrides)
        return derive(prepare(args), Facts(num_devices=info.world_size)).to_resolved()

    config = share_config(store, info.rank, info.world_size, read, own_files=resolved is None)
    args = NeoXArgs.from_resolved(config)
    if not resolved and args.logging.log_dir:  # our own launcher keeps each rank's output there itself
        log.configure(info.rank, level, Path(args.logging.log_dir) / f"rank_{info.rank}.log")
    tokenizer = build_tokenizer(args.tokenizer)
    args = derive(args, Facts(vocab_size=tokenizer.vocab_size, num_devices=info.world_size))
    device = pick_device(info)
    init_distributed(args, info, device, store)
    topology = Topology(
        {
            "pipe": max(1, args.parallel.pipe_parallel_size),
            "data": args.parallel.data_parallel_size,
            "model": args.parallel.model_parallel_size,
        }
    )
    state = ParallelState.build(
        topology, info.rank, device, args.parallel.sequence_parallel, args.parallel.expert_parallel_size
    )
    seed_everything(args.training.seed, state)
    return Process(args, state, tokenizer)


def launcher_preference(paths: list[str], overrides: list[str]) -> str | None:
    """Whose variables say which rank this is, as far as the configuration says: "mpi", "slurm" or None."""
    try:
        launcher = load(paths, overrides).launcher
    except UserError:
        return None  # told once the ranks have met, so that it is told once
    return "mpi" if launcher.deepspeed_mpi else "slurm" if launcher.deepspeed_slurm else None


def _store(info: RankInfo) -> dist.Store:
    """The rendezvous store; torchrun's agent already hosts one on the master's port."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "29500" if info.world_size > 1 else "0"))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    return make_store(address, port, info.rank, info.world_size, agent)


def pick_device(info: RankInfo) -> torch.device:
    """The GPU of this rank's local number, or the CPU when there is none or `DS_ACCELERATOR=cpu` asks for it.

    Raises:
        UserError: more ranks on this machine than GPUs.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if info.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"num_gpus: rank {info.local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}. "
            "Start fewer ranks, or run on the CPU with DS_ACCELERATOR=cpu in the environment"
        )
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    return device


def init_distributed(args: NeoXArgs, info: RankInfo, device: torch.device, store: dist.Store | None) -> None:
    """Initialise torch.distributed and DeepSpeed's view of it. `nccl` without a GPU becomes gloo, said once."""
    backend = args.parallel.distributed_backend
    if backend == "nccl" and device.type == "cpu":
        logger.info("no GPU: distributed_backend nccl becomes gloo")
        backend = "gloo"
    os.environ.setdefault("LOCAL_RANK", str(info.local_rank))  # DeepSpeed's pipeline module reads it
    for name, value in (("RANK", info.rank), ("WORLD_SIZE", info.world_size)):
        os.environ.setdefault(name, str(value))
    if not dist.is_initialized():
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size)
    init_deepspeed(device)


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


def build_model(process: Process, seed: int | None) -> torch.nn.Module:
    """This rank's part of the network: a sequential model, or one stage of a pipeline.

    `seed` of the initial weights; None leaves zeros, because a checkpoint follows.
    """
    args, state = process.args, process.state
    layers = gpt_layers(
        args.model,
        vocab_size=process.tokenizer.vocab_size,
        padded_vocab_size=args.tokenizer.padded_vocab_size,
        state=state,
    )
    objective = OBJECTIVES[args.training.train_impl]
    with quiet_stdout():
        if state.pp_size > 1:
            return LayerPipe(layers, objective, args.parallel.pipe_partition_method, seed, state)
        return SequentialModel(layers, objective, seed, state, _partitioner(args, state))


def _partitioner(args: NeoXArgs, state: ParallelState) -> Callable[[torch.nn.Module], object] | None:
    """Under ZeRO-3, what hands a layer's parameters to their owners before the next layer is built."""
    group = state.group("data")
    if effective_zero_stage(args) < 3 or group is None:
        return None
    # DeepSpeed would hold the batch sizes against the whole world here, tensor-parallel ranks included.
    kept = ("zero_optimization", "bf16", "fp16")
    config = {"train_micro_batch_size_per_gpu": 1, **{k: v for k, v in deepspeed_config(args).items() if k in kept}}
    dtype = {"bfloat16": torch.bfloat16, "fp16": torch.float16}.get(args.optimizer.precision or "", torch.float32)

    def hand_over(layer: torch.nn.Module) -> None:
        for p in layer.parameters():
            p.data = p.data.to(dtype)  # what is partitioned keeps its type: the engine no longer casts it
        deepspeed.zero.Init(module=layer, data_parallel_group=group, config_dict_or_path=config)

    return hand_over


def build_engine(process: Process, model: torch.nn.Module) -> DeepSpeedEngine:
    """Wrap the model in DeepSpeed with its optimizer."""
    args, state = process.args, process.state
    optimizer_args = args.optimizer
    # muP: hidden matrices learn at lr / width multiplier (Yang et al. 2022, table 8, Adam).
    mult = 1.0 / args.model.mup_width_mult if args.model.use_mup else 1.0
    groups = parameter_groups(model.parameters(), weight_decay=optimizer_args.weight_decay, matrix_lr_mult=mult)
    if state.ep_size > 1:
        groups = experts_apart(groups)
    params = dict((optimizer_args.optimizer or {}).get("params") or {})  # a plugin's optimizer may have more of them
    params |= {"betas": optimizer_args.betas, "eps": optimizer_args.eps, "momentum": optimizer_args.momentum}
    optimizer = build_optimizer(optimizer_args.optimizer_type, groups, optimizer_args.lr, params)
    grid = None
    if state.pp_size == 1:
        from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=state.tp_size, num_dp=state.dp_size)
        with quiet_stdout():
            grid = PipelineParallelGrid(topology=topology)
    stage = effective_zero_stage(args)
    compiled = wants_compile(args.model, state, stage)
    with quiet_stdout():
        engine = DeepSpeedEngine(
            model,
            optimizer,
            deepspeed_config(args),
            state,
            stage=stage,
            precision=optimizer_args.precision,
            max_norm=optimizer_args.gradient_clipping,
            grid=grid,
        )
    if compiled:
        compile_blocks(engine.module)
    return engine


def build_schedule(args: NeoXArgs) -> Callable[[int], float]:
    """The learning rate as a function of completed steps."""
    return schedule(
        lr=args.optimizer.lr,
        min_lr=args.schedule.min_lr,
        decay_iters=args.schedule.lr_decay_iters,
        warmup=args.schedule.warmup,
        style=args.schedule.lr_decay_style,
    )


def run(process: Process, work: Callable[[Process], int]) -> int:
    """Do a rank's work; leave the job in order, also with an error that all ranks agree on. Returns the exit code."""
    try:
        code = work(process)
    except DeepyError as error:
        if not isinstance(error, LostRankError):  # leaving in order needs everybody
            shut_down()
        raise
    shut_down()
    return code


def shut_down() -> None:
    """Leave the job in order; a rank that exits with a live group may be reported as aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()
