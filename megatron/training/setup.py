"""From a command line to a rank that trains: config, tokenizer, device, groups; then model, optimizer, engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron import log
from megatron.checkpoint.agreement import gather
from megatron.errors import UserError
from megatron.layers.lora import Adapters
from megatron.model.gpt import gpt_layers
from megatron.model.sequential import SequentialModel
from megatron.model.specs import check_targets
from megatron.mpu.random import seed_everything
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.lengths import cycle_ends, in_steps
from megatron.neox_arguments.optimizer_params import KIND, optimizer_params
from megatron.neox_arguments.parameter_rules import check_matches, parse_rules
from megatron.neox_arguments.problems import Problems, collector
from megatron.objectives import OBJECTIVES, Objective
from megatron.optim.groups import check_stages, freeze_parameters, parameter_groups, trained_rules
from megatron.optim.matrices import WholeMatrices
from megatron.optim.optimizers import build_optimizer
from megatron.optim.schedules import schedule
from megatron.rows import row
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.compile import compile_blocks, wants_compile
from megatron.training.engine_config import effective_zero_stage
from megatron.training.engine_step import StepEngine
from megatron.training.l2_norms import all_names
from megatron.training.native.engine import NativeEngine
from megatron.training.outliers import Outliers
from megatron.training.rendezvous import share_config
from megatron.training.setup_deterministic import make_deterministic
from megatron.training.setup_device import can_compile, pick_device, refuse_shared_gpus, warn_of_few_cores
from megatron.training.setup_distributed import (
    find_rank,
    init_distributed,
    leave_job,
    open_store,
    time_limits,
)
from megatron.training.time_limits import TimeLimits


@dataclass(frozen=True)
class Process:
    """One rank, ready to build things.

    Attributes:
        args: the derived configuration, the same on every rank.
        state: this rank's place in the layout.
        tokenizer: the run's tokenizer.
        store: where the ranks met.
        limits: for how long they wait for each other.
    """

    args: NeoXArgs
    state: ParallelState
    tokenizer: Tokenizer
    store: dist.Store | None = None
    limits: TimeLimits | None = None


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
    kept = os.environ.pop(log.RANK_LOG, "")  # by our own launcher, which sees what goes to stderr
    log.configure(info.rank, level, Path(kept) if kept else None, beside=True)
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
    if not resolved and args.logging.log_dir:
        log.configure(info.rank, level, Path(args.logging.log_dir) / f"rank_{info.rank}.log")
    tokenizer = build_tokenizer(args.tokenizer)
    args = derive(args, Facts(vocab_size=tokenizer.vocab_size, num_devices=info.world_size))
    device = pick_device(info)
    if args.training.deterministic:
        make_deterministic()
    init_distributed(args, info, device, store)
    topology = Topology(
        {
            "pipe": max(1, args.parallel.pipe_parallel_size),
            "data": args.parallel.data_parallel_size,
            "model": args.parallel.model_parallel_size,
        }
    )
    limits = time_limits(args)
    timeout = timedelta(seconds=limits.host)
    state = ParallelState.build(
        topology,
        info.rank,
        device,
        args.parallel.sequence_parallel,
        args.parallel.expert_parallel_size,
        timeout,
        timeout,
    )
    refuse_shared_gpus(state)
    warn_of_few_cores(state)
    seed_everything(args.training.seed, state)
    return Process(args, state, tokenizer, store, limits)


def build_objective(args: NeoXArgs) -> Objective:
    """What is trained."""
    return OBJECTIVES[args.training.train_impl](args.post)


def build_model(process: Process, seed: int | None) -> torch.nn.Module:
    """This rank's part of the network: a sequential model, or one stage of a pipeline.

    `seed` of the initial weights; None leaves zeros, because a checkpoint follows.
    """
    args, state = process.args, process.state
    if (adapters := Adapters.of(args.post)) is not None:
        place = args.sources.get("lora_target_modules")
        check_targets(args.model, adapters, f"{place}: " if place else "")
    objective = build_objective(args)
    if objective.inner_layer is not None and not 0 <= objective.inner_layer < args.model.num_layers:
        raise UserError(
            f"train_impl: {args.training.train_impl} reads block {objective.inner_layer}, from 0, of num_layers: "
            f"{args.model.num_layers}"
        )
    layers = gpt_layers(
        args.model,
        vocab_size=process.tokenizer.vocab_size,
        padded_vocab_size=args.tokenizer.padded_vocab_size,
        state=state,
        adapters=adapters,
        inner=objective.inner_layer,
    )
    if args.optimizer.engine == "native":
        return SequentialModel(layers, objective, seed, state)
    from megatron.training.setup_deepspeed import (
        build_deepspeed_model,  # and so DeepSpeed
    )

    timeout = timedelta(seconds=process.limits.host) if process.limits else None
    return build_deepspeed_model(args, state, layers, objective, seed, timeout)


def build_engine(process: Process, model: torch.nn.Module) -> StepEngine:
    """The engine of `engine` around the model, with its optimizer."""
    args, state = process.args, process.state
    optimizer_args = args.optimizer
    # muP: hidden matrices learn at lr / width multiplier (Yang et al. 2022, table 8, Adam).
    mult = 1.0 / args.model.mup_width_mult if args.model.use_mup else 1.0
    if rules := parse_rules(optimizer_args.parameter_groups):
        names = all_names(dict(named_parameters(model)), state)
        place = args.sources.get("parameter_groups")
        check_matches(rules, names, f"{place}: " if place else "")
    rules = trained_rules(optimizer_args, args.post)
    freeze_parameters(model.parameters(), rules)
    whole = row(KIND, optimizer_args.optimizer_type).get("matrices")
    groups = parameter_groups(
        model.parameters(),
        weight_decay=optimizer_args.weight_decay,
        matrix_lr_mult=mult,
        decay_embeddings=optimizer_args.decay_embeddings,
        rules=rules,
        matrices=WholeMatrices(state, every=whole == "all") if whole else None,
    )
    trains = gather((state.pp_rank, bool(groups)), state) if rules else []  # without rules every stage does
    check_stages([stage for stage, some in trains if not some])
    params = optimizer_params(optimizer_args.optimizer_type, optimizer_args.optimizer)

    def build(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return build_optimizer(optimizer_args.optimizer_type, groups, optimizer_args.lr, params)

    fixed_point = args.training.deterministic == "layout"
    if fixed_point and state.device.type == "cpu":
        torch.set_num_threads(1)  # with more of them a sum over rows is cut into other parts
    stage = effective_zero_stage(args)
    compiled = wants_compile(args.model, state) and can_compile(args.model.torch_compile, state)
    if optimizer_args.engine == "native":
        assert isinstance(model, SequentialModel), "the native engine is one stage (rules_engine)"
        engine: StepEngine = NativeEngine(
            model,
            groups,
            build,
            state,
            precision=optimizer_args.precision,
            max_norm=optimizer_args.gradient_clipping,
            micro_batches=args.training.gradient_accumulation_steps,
            bucket_elements=(optimizer_args.zero_optimization or {}).get("reduce_bucket_size"),
            fixed_point=fixed_point,
        )
    else:
        from megatron.training.setup_deepspeed import build_deepspeed_engine

        engine = build_deepspeed_engine(args, state, model, groups, build, stage)
    if isinstance(optimizer_args.skip_outliers, dict):  # as the rule leaves it
        engine.outliers = Outliers(**optimizer_args.skip_outliers, device=state.device)
    if optimizer_args.ema_decay is not None:
        engine.keep_average(optimizer_args.ema_decay)
    if compiled:
        compile_blocks(engine.module, stage)
    return engine


def build_schedule(args: NeoXArgs) -> Callable[[int], float]:
    """The learning rate as a function of completed steps."""
    options, steps = args.schedule, args.schedule.steps or 0
    rate = schedule(
        lr=args.optimizer.lr,
        min_lr=options.min_lr,
        decay_iters=steps,
        warmup=options.warmup_share,
        style=options.lr_decay_style,
        cooldown=partial(in_steps, options.lr_cooldown),
        cooldown_style=options.lr_cooldown_style,
        rewarmup=partial(in_steps, options.lr_rewarmup),
        cycles=cycle_ends(options.lr_cycles, steps),
        power=options.lr_decay_power,
    )
    plan = BatchPlan.of(args)
    return lambda step: rate(step) * plan.lr_factor(step)


def run(process: Process, work: Callable[[Process], int]) -> int:
    """Do a rank's work and leave the job in order. Returns the exit code.

    With an error that cannot be: the device's library would wait for operations in which others have to take part.
    """
    try:
        code = work(process)
    except BaseException as error:
        log.note_failure(error)
        if process.state.topology.world_size == 1:
            leave_job()
        raise
    leave_job()
    return code
