"""One training run, from a process that has joined the job to its exit code: the whole library, put together."""

from __future__ import annotations

from dataclasses import replace

from megatron.callbacks import RunContext, build_callbacks
from megatron.checkpoint.agreement import meet
from megatron.checkpoint.manifest import git_revision
from megatron.cluster.status import run_folder
from megatron.log import DETAIL, get_logger
from megatron.mpu.owned import count_parameters
from megatron.neox_arguments.derive import check_device, check_trainable
from megatron.neox_arguments.rules_post import has_teacher
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.run.batches import DataOrder, build_batches, named_sets, open_data_on_ranks, share_epochs
from megatron.run.data import note_trained_ends, resume_order
from megatron.run.end import Begins, StepLimits, report_stop, watched
from megatron.run.frozen import FrozenStates
from megatron.run.other_models import OtherModels
from megatron.run.reference import find_reference
from megatron.run.reference_point import ReferencePoint
from megatron.run.rewind import train_with_rewinds
from megatron.run.rollouts import Rollouts
from megatron.run.screen import show_end, show_start
from megatron.run.start import (
    TokenizerIdentity,
    TrackerIds,
    begin,
    log_start,
    resume_config,
    save_lock,
    setup_status,
    share_start,
)
from megatron.run.teacher import StoredTeacher, Teacher
from megatron.training.progress import Progress
from megatron.training.setup import Process, build_engine, build_model, build_schedule
from megatron.training.trainer import Trainer

logger = get_logger(__name__)


def train(process: Process) -> int:
    """Train as configured and return the exit code. The same call on every rank."""
    state = process.state
    args = share_epochs(process)
    check_trainable(args)
    check_device(args, state.device.type == "cuda")
    if state.rank == 0 and args.logging.git_hash is None:
        args = args.replace("git", git_hash=git_revision())  # kept with the run and its checkpoints
    progress = Progress()
    with watched(args, state, process.store, progress):
        trainer = _train(replace(process, args=args), progress)
        # srun and mpirun kill the ranks that are left as soon as one leaves with a code other than 0.
        meet(state)
    show_end(trainer)
    if trainer.stop_code:
        report_stop(trainer)
    return 0


def _train(process: Process, progress: Progress) -> Trainer:
    args, state, tokenizer = process.args, process.state, process.tokenizer
    with save_lock(args, state) as announced_end, setup_status(args, state.rank):
        start = share_start(args, state)
        log_start(args, start)
        args = resume_config(args, start)
        order, done = resume_order(start, args.checkpoint.load)
        datasets = open_data_on_ranks(args, process, order, done)
        plan = datasets.plan
        args = note_trained_ends(args, plan)
        point = ReferencePoint.of(args, datasets, done)
        exchanged = {} if point is None else point.exchanged
        reference = find_reference(args, start, tokenizer, datasets, done[1], exchanged)
        process = replace(process, args=args)
        others = OtherModels(args, start, state)
        told = None
        if has_teacher(args.get) and args.post.distill_precompute:
            told = StoredTeacher(process, start, others, datasets, done[1])
            told.fill(progress)
        stores = [one.store for one in (reference, told) if one is not None]
        batches = build_batches(args, process, datasets, stores[0] if stores else None, point)
        if has_teacher(args.get) and told is None:
            teacher = Teacher(process, others.find("distill_teacher"))
            batches = {role: teacher.beside(steps) for role, steps in batches.items()}
        frozen = FrozenStates.of(args)
        if frozen is not None and "train" in batches:
            batches["train"] = frozen.beside(batches["train"])
        sets = named_sets(plan, batches)
        folder, fresh = run_folder(args), start.checkpoint is None
        own = [Rollouts(process, folder, others)] if trains_on_rollouts(args.get) else []
        if own:
            batches["train"] = own[0].batches
        context = RunContext(args, state, tokenizer.vocab_size, folder, batches, sets, tokenizer, fresh)
        identity = TokenizerIdentity(tokenizer, args.checkpoint.allow_config_changes)
        trackers = TrackerIds(folder)
        trackers.restore(start, state)
        before = [one for one in (reference, told, point, frozen) if one is not None]
        callbacks = [DataOrder(plan), identity, trackers, others, *before, *own, *build_callbacks(context)]
        if state.host is not None and process.limits is not None:
            callbacks.append(StepLimits(process.limits))
        callbacks += [*announced_end, Begins()]
        # With train_iters 0 there is nothing to train on, only what is loaded to be validated and tested.
        steps = batches.get("train", lambda consumed=0, step=None: iter(()))
        trainer = Trainer(args, state, steps, callbacks, build_schedule(args), progress)
        with trainer.tell_error():
            # After the callbacks: the profiler sees the memory of the model.
            model = build_model(process, None if start.checkpoint is not None else args.training.seed)
            parameters = count_parameters(model, state)
            logger.log(DETAIL, f"parameters: {parameters:,}")
            trainer.engine = build_engine(process, model)
            begin(trainer, start)
            show_start(context, plan, parameters, trainer.step)
            train_with_rewinds(trainer)
    return trainer
