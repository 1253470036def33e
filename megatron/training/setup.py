"""From a command line to a rank that trains: config, tokenizer, device, groups; then model, optimizer, engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron import log
from megatron.errors import DeepyError, LostRankError
from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe, SequentialModel
from megatron.mpu.random import seed_everything
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.optimizer_params import optimizer_params
from megatron.neox_arguments.problems import Problems, collector
from megatron.objectives import OBJECTIVES
from megatron.optim.groups import parameter_groups
from megatron.optim.optimizers import build_optimizer
from megatron.optim.schedules import schedule
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.compile import compile_blocks, wants_compile
from megatron.training.engine_config import deepspeed_config, effective_zero_stage
from megatron.training.engine_deepspeed import DeepSpeedEngine
from megatron.training.engine_experts import split_expert_groups
from megatron.training.rendezvous import share_config
from megatron.training.setup_deepspeed import grid_of, layer_partitioner, quiet_stdout
from megatron.training.setup_distributed import find_rank, init_distributed, leave_job, open_store, pick_device
from megatron.training.watchdog import collective_timeout


@dataclass(frozen=True)
class Process:
    """One rank, ready to build things.

    Attributes:
        args: the derived configuration, the same on every rank.
        state: this rank's place in the layout.
        tokenizer: the run's tokenizer.
        store: where the ranks met.
    """

    args: NeoXArgs
    state: ParallelState
    tokenizer: Tokenizer
    store: dist.Store | None = None


def start_process(
    paths: list[str],
    overrides: list[str],
    resolved: str | None,
    prepare: Callable[[NeoXArgs], NeoXArgs] = lambda args: args,
    check: Callable[[NeoXArgs, Problems], None] = lambda args, found: None,
) -> Process:
    """Join the job: agree on the configuration, pick the device, initialise torch.distributed and the groups.

    Args:
        paths, overrides: YAML files and `key=value` given to this rank (torchrun, srun, mpirun).
        resolved: instead of those, the file in which the launcher left the resolved configuration (rank 0 reads it).
        prepare: what the script makes of the configuration before anything is derived (`for_inference`).
        check: what the script needs besides (`check_trainable`); it adds to the problems.
    """
    info = find_rank([] if resolved else paths, overrides)
    level = os.environ.get("LOGLEVEL", "INFO")
    log.configure(info.rank, level)
    store = open_store(info)

    def read() -> str:
        with collector() as found:
            written = NeoXArgs.from_resolved(Path(resolved).read_text()) if resolved else None
            args = prepare(written or NeoXArgs.from_files(paths, overrides, problems=found))
            args = derive(args, Facts(num_devices=info.world_size), found)
            check(args, found)
        return args.to_resolved()

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
    timeout = collective_timeout(args.launcher.watchdog_seconds)
    state = ParallelState.build(
        topology, info.rank, device, args.parallel.sequence_parallel, args.parallel.expert_parallel_size, timeout
    )
    seed_everything(args.training.seed, state)
    return Process(args, state, tokenizer, store)


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
        return SequentialModel(layers, objective, seed, state, layer_partitioner(args, state))


def build_engine(process: Process, model: torch.nn.Module) -> DeepSpeedEngine:
    """Wrap the model in DeepSpeed with its optimizer."""
    args, state = process.args, process.state
    optimizer_args = args.optimizer
    # muP: hidden matrices learn at lr / width multiplier (Yang et al. 2022, table 8, Adam).
    mult = 1.0 / args.model.mup_width_mult if args.model.use_mup else 1.0
    groups = parameter_groups(model.parameters(), weight_decay=optimizer_args.weight_decay, matrix_lr_mult=mult)
    if state.ep_size > 1:
        groups = split_expert_groups(groups)
    params = optimizer_params(optimizer_args.optimizer_type, optimizer_args.optimizer)
    optimizer = build_optimizer(optimizer_args.optimizer_type, groups, optimizer_args.lr, params)
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
            grid=grid_of(state),
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
            leave_job()
        raise
    leave_job()
    return code
