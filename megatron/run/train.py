"""One training run, from a process that has joined the job to its exit code: the whole library, put together."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from megatron.callbacks import RunContext, build_callbacks
from megatron.checkpoint.manifest import git_revision
from megatron.cluster.status import run_folder
from megatron.log import get_logger
from megatron.mpu.owned import count_parameters
from megatron.neox_arguments.derive import check_device, check_trainable
from megatron.run.batches import DataOrder, build_batches, named_sets, open_data_on_ranks
from megatron.run.data import note_trained_ends, resolve_epochs, resume_order
from megatron.run.end import report_stop, watched
from megatron.run.start import TokenizerIdentity, begin, log_start, resume_config, save_lock, setup_status, share_start
from megatron.signals import lose_at_stop
from megatron.training.setup import Process, build_engine, build_model, build_schedule
from megatron.training.trainer import Trainer

logger = get_logger(__name__)


def train(process: Process) -> int:
    """Train as configured and return the exit code. The same call on every rank."""
    state, tokenizer = process.state, process.tokenizer
    args = resolve_epochs(process.args, tokenizer)
    check_trainable(args)
    check_device(args, state.device.type == "cuda")
    if state.rank == 0 and args.logging.git_hash is None:
        args = args.replace("git", git_hash=git_revision())  # kept with the run and its checkpoints
    with save_lock(args, state) as announced_end, setup_status(args, state.rank):
        start = share_start(args, state)
        log_start(args, start)
        args = resume_config(args, start)
        plan = open_data_on_ranks(args, process, *resume_order(start, args.checkpoint.load))
        args = note_trained_ends(args, plan)
        batches = build_batches(args, process, plan)
        process = replace(process, args=args)
        sets = named_sets(plan, batches)
        context = RunContext(args, state, tokenizer.vocab_size, run_folder(args), batches, sets, tokenizer)
        identity = TokenizerIdentity(tokenizer, args.checkpoint.allow_config_changes)
        callbacks = [DataOrder(plan), identity, *build_callbacks(context), *announced_end]
        # After the callbacks: the profiler sees the memory of the model.
        model = build_model(process, None if start.checkpoint is not None else args.training.seed)
        logger.info(f"parameters: {count_parameters(model, state):,}")
        engine = build_engine(process, model)
        # With train_iters 0 there is nothing to train on, only what is loaded to be validated and tested.
        steps = batches.get("train", lambda consumed: iter(()))
        trainer = Trainer(args, engine, steps, callbacks, build_schedule(args))
        begin(trainer, start)
        lose_at_stop()
        with watched(trainer, process.store):
            trainer.run()
    # srun and mpirun kill the ranks that are left as soon as one leaves with a code other than 0.
    dist.barrier()
    if trainer.stop_code:
        report_stop(trainer)
    return 0
