"""Where a run starts: fresh, resumed, or initialised from another run; decided once, the same on every rank."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.agreement import await_thread, broadcast, together
from megatron.checkpoint.base import open_base
from megatron.checkpoint.compare import check_config, converted_to_engine
from megatron.checkpoint.damage import find_damage
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.folder import recover
from megatron.checkpoint.grown import Growth
from megatron.checkpoint.init_from import check_init
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.lock import SaveLock
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.schedule import resume_schedule
from megatron.checkpoint.start import Start, decide_start
from megatron.checkpoint.tokenizer_identity import check_identity
from megatron.cluster.status import StatusFile, run_folder
from megatron.cluster.tracker_id import read_tracker_ids, restore_tracker_ids
from megatron.convert.hf.run_config import keep_tokenizer, with_kept_tokenizer
from megatron.convert.published.reader import open_published
from megatron.errors import UserError
from megatron.hub.s3_load import fetch_first
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs, plugin_key
from megatron.neox_arguments.callback_key import choose_callbacks
from megatron.neox_arguments.differences import find_differences
from megatron.plugins import source_changes
from megatron.run.end import AnnouncedEnd
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.model_tokens import inherit
from megatron.training.callback import Callback
from megatron.training.trainer import Trainer

logger = get_logger(__name__)


class TokenizerIdentity(Callback):
    """Saves the tokenizer's fingerprint, so that no run is resumed with ids that mean something else."""

    def __init__(self, tokenizer: Tokenizer, allow: bool) -> None:
        self.tokenizer = tokenizer
        self.allow = allow

    def state_dict(self) -> dict[str, Any]:
        return self.tokenizer.fingerprint().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.allow:
            check_identity(state, self.tokenizer, "the checkpoint")


class TrackerIds(Callback):
    """Saves the run's ids in its trackers, so that it stays one run there when only its checkpoints reach the next
    machine."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {} if self.folder is None else dict(read_tracker_ids(self.folder))

    def restore(self, start: Start, state: ParallelState) -> None:
        """Before the trackers are built: what the run's own checkpoint says goes into the folder. Collective."""
        if start.kind != "resume" or start.checkpoint is None or self.folder is None:
            return  # a run that starts from another one's checkpoint is another run
        with together("restoring the ids of trackers", state):
            if state.rank == 0:
                restore_tracker_ids(self.folder, start.checkpoint.callbacks.get(type(self).__name__) or {})


@contextlib.contextmanager
def save_lock(args: NeoXArgs, state: ParallelState) -> Iterator[list[Callback]]:
    """Rank 0 holds the lock of `save`; a folder that another job writes is refused on every rank.

    Gives the callback of the rank that holds it, which has to run after all others.
    """
    lock = SaveLock(args.checkpoint.save) if args.checkpoint.save and state.rank == 0 else None
    with together("locking save", state):
        if lock is not None:
            lock.acquire()
            recover(lock.path.parent)  # what a killed job left half renamed is a checkpoint again
    try:
        yield [] if lock is None else [AnnouncedEnd(lock)]
    finally:
        if lock is not None:
            lock.release()


@contextlib.contextmanager
def setup_status(args: NeoXArgs, rank: int) -> Iterator[None]:
    """Write `status.json` (rank 0), unless it is switched off, until there is a trainer: the run starts, or why it
    failed."""
    wanted = rank == 0 and any(one.name == "run_status" for one in choose_callbacks(args))
    folder = run_folder(args) if wanted else None
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = StatusFile(folder)
    before = (file.read() or {}).get("step")
    step = before if isinstance(before, int) else 0  # of the start before: its checkpoint is still there
    first = file.write("starting", step, args.training.train_iters)
    try:
        yield
    except BaseException as error:
        if file.read() == first:  # else the trainer has written it
            file.write_failure(error, step, args.training.train_iters)
        raise


def share_start(args: NeoXArgs, state: ParallelState) -> Start:
    """Where the run starts, from a checkpoint whose files are as they were written, if there is one like that.

    Rank 0 decides and opens the checkpoint; it sends the others what it read: they could see
    a shared file system at another moment, and would ask it the same questions.

    Call it with the lock held: the job that held it before may have saved a newer checkpoint until then.
    """
    damaged: dict[Path, str] = {}
    tried: set[Path] = set()
    fetch = True
    while True:
        start = _share_decision(args, state, damaged, fetch)
        if start.checkpoint is None or not args.checkpoint.checkpoint_checksums:
            return start
        load_optim = start.load_optim and not args.checkpoint.no_load_optim
        problem = find_damage(start.checkpoint, state, load_optim=load_optim)
        if problem is None:
            _check_base(args, start.checkpoint, state)
            return start
        logger.warning(f"{start.checkpoint.path} is damaged: {problem}")
        fetch = start.checkpoint.path not in tried  # a disk that damages what it is given would go on for ever
        tried.add(start.checkpoint.path)
        damaged[start.checkpoint.path] = problem


def _check_base(args: NeoXArgs, checkpoint: Checkpoint, state: ParallelState) -> None:
    """Raise `UserError` when the checkpoint names another that has the frozen weights, and this one is not there or
    damaged. Collective."""
    with together("opening the base of the adapters", state):
        base = open_base(checkpoint, args.post.lora_base)
    if base is not None and (problem := find_damage(base, state, load_optim=False)):
        raise UserError(f"{base.path}, the base of the adapters in {checkpoint.path}, is damaged: {problem}")


def _share_decision(args: NeoXArgs, state: ParallelState, damaged: dict[Path, str], fetch: bool) -> Start:
    """What `share_start` decides while those in `damaged` do not count; one that is replaced is taken out of them."""
    failed: list[Exception] = []
    if fetch and (args.checkpoint.s3_path or args.checkpoint.s3_load):
        failed = _fetch_stored(args, state, damaged)
    start: Start | None = None
    with together("deciding where to start", state):
        if state.rank == 0:
            if failed:
                raise failed[0]
            start = decide_start(args.checkpoint, damaged=damaged)  # it has read what the callbacks saved
            if args.checkpoint.save is not None and start.checkpoint is not None and start.checkpoint.published:
                keep_tokenizer(args.checkpoint.save, start.checkpoint, args.tokenizer.vocab_file)
    start = broadcast(start, state)
    assert start is not None
    return start


def _fetch_stored(args: NeoXArgs, state: ParallelState, damaged: dict[Path, str]) -> list[Exception]:
    """Rank 0 downloads what the start lacks, however long it takes. Returns what it failed with, if so. Collective."""
    failed: list[Exception] = []

    def fetch() -> None:
        try:
            fetch_first(args.checkpoint, damaged)
        except Exception as error:  # of whatever class: it is raised where all ranks learn of it
            failed.append(error)

    thread = threading.Thread(target=fetch, name="s3_download", daemon=True) if state.rank == 0 else None
    if thread is not None:
        thread.start()
    for _ in await_thread(thread, state):
        pass
    return failed


def log_start(args: NeoXArgs, start: Start) -> None:
    """Log, before anything is built: notes, plugins, differences from GPT-NeoX, where the run starts."""
    for note in args.notes:
        logger.info(note)
    for name, digest, registered in plugin_key.describe(args.launcher.plugins):
        logger.info(f"plugin {name} (sha256 {digest}) registers {registered}")
    _log_differences(args, begins=start.kind != "resume")
    logger.log(logging.WARNING if start.skips else logging.INFO, start.message)


def _log_differences(args: NeoXArgs, *, begins: bool) -> None:
    """How many differences from GPT-NeoX matter for the config; before the first checkpoint (`begins`) log files have
    what they are, if it sets a key that means something else there."""
    found = find_differences(args)
    if not found:
        return
    listed = "--dry-run lists them" + (f", and so does {folder}/resolved.yml" if (folder := run_folder(args)) else "")
    logger.info(f"{len(found)} differences from GPT-NeoX matter for this config ({listed})")
    for one in found if begins and any(one.concerns(args) for one in found) else ():
        logger.debug(f"  {one.line}")


def resume_config(args: NeoXArgs, start: Start) -> NeoXArgs:
    """`args` with what a run inherits from its checkpoint (if there is one); what changed since is logged.

    Raises `UserError` for a change that would break the run.
    """
    if start.checkpoint is None:
        if args.post.lora_base is not None:
            raise UserError("lora_base: this run starts with new weights; name the base in load, with finetune=true")
        return args
    if start.checkpoint.published is not None:
        args = with_kept_tokenizer(args)
    saved = start.checkpoint.manifest
    tokens = inherit(args.tokenizer.model_tokens, saved.config.get("model_tokens"))
    if tokens != args.tokenizer.model_tokens:
        args = args.replace("the checkpoint", model_tokens=tokens)
    for message in check_config(
        saved.config if start.init is None else start.init.grown(saved.config, args.to_dict()),
        args.to_dict(),
        path=start.checkpoint.path,
        allow=args.checkpoint.allow_config_changes,
        finetune=start.kind == "finetune",
        new_run=not start.resumes,
        load_optim=start.load_optim and not args.checkpoint.no_load_optim,
        load_data=start.load_data,
        trained=saved.trained,
    ):
        logger.info(message)
    for change in () if start.resumes else converted_to_engine(saved.config, args.to_dict()):
        logger.warning(f"te_layernorm_mlp computes the feed-forward differently from the checkpoint: {change}")
    for message in source_changes(saved.config.get("plugin_sources"), args.launcher.plugin_sources):
        logger.info(f"changed since the checkpoint: {message}")
    return _with_schedule(_with_origin(_with_base(args, start), saved, start), saved.config, start)


def _with_base(args: NeoXArgs, start: Start) -> NeoXArgs:
    """`args` with the checkpoint that has the frozen weights of a run that trains adapters alone: that of the
    checkpoint that it starts from, or this one; None when the run's own have to hold them."""
    checkpoint = start.checkpoint
    assert checkpoint is not None
    if args.post.lora_r is None:
        return args
    if checkpoint.manifest.base is not None:
        base: str | None = args.post.lora_base or checkpoint.manifest.base.path
    elif args.post.lora_base is not None and start.kind != "resume":
        raise UserError(
            f"lora_base: {checkpoint.path} holds all weights, so they have not moved; leave the key out: "
            f"{checkpoint.path} is the base"
        )
    else:
        grows = start.init is not None and start.init.grows
        base = None if start.resumes or grows else checkpoint.published or str(checkpoint.path.absolute())
    return args if base == args.post.lora_base else args.replace("the checkpoint", lora_base=base)


def _with_origin(args: NeoXArgs, saved: Manifest, start: Start) -> NeoXArgs:
    """`args` with the `init_from` that this run began from, and the step that it found there.

    Raises `UserError` when this start asks for what the checkpoint cannot give.
    """
    if start.init is not None:
        options = args.schedule
        check_init(
            start.init,
            saved,
            train_iters=args.training.train_iters,
            use_checkpoint_lr_scheduler=options.use_checkpoint_lr_scheduler,
        )
        return args.replace("the checkpoint", init_from={**args.checkpoint.init_from, "iteration": saved.step})
    if start.kind == "resume" and args.checkpoint.init_from != (origin := saved.config.get("init_from")):
        return args.replace("the checkpoint", init_from=origin)
    return args


def _with_schedule(args: NeoXArgs, saved: dict[str, Any], start: Start) -> NeoXArgs:
    """`args` with the learning-rate schedule of a resumed run (checkpoint/schedule)."""
    if not start.resumes or args.checkpoint.no_load_optim or not args.training.train_iters:
        return args
    options = args.schedule
    values = resume_schedule(
        saved,
        args.to_dict(),
        override=options.override_lr_scheduler,
        use_checkpoint=options.use_checkpoint_lr_scheduler,
    )
    return args.replace("the checkpoint", **values) if options.use_checkpoint_lr_scheduler else args


def begin(trainer: Trainer, start: Start) -> None:
    """Run the hook `start`, then load what the start asks for, watched from here on: every parameter is a sign of
    progress."""
    trainer.call("start")
    trainer.engine.beat = trainer.progress.beat
    trainer.progress.began = True
    if start.checkpoint is not None:
        restore(trainer, start)


def restore(trainer: Trainer, start: Start, checksums: bool = False, whole: bool = False) -> None:
    """Load what the start asks for: everything, only the weights, or what `init_from` names. `whole`: whatever
    `no_load_optim` and `no_load_rng` say, which are about the checkpoint that this process began with."""
    assert start.checkpoint is not None
    options = trainer.args.checkpoint
    seed, rewards = trainer.args.training.seed, trainer.args.model.output_head == "reward"
    client = load_checkpoint(
        start.checkpoint,
        trainer.engine,
        trainer.state,
        heads=Heads.of(trainer.args.model),
        model=trainer.args.model,
        load_optim=start.load_optim and (whole or not options.no_load_optim),
        load_rng=start.load_rng and (whole or not options.no_load_rng),
        checksums=checksums,  # `share_start` has compared them
        growth=Growth.of(start.init, seed, new_head=rewards and not start.load_optim),
        lora_base=trainer.args.post.lora_base,
        seed=seed,
        published=open_published,
    )
    if start.resumes:
        trainer.load_state_dict(client)
    elif start.init is not None:
        identity = client.get("callbacks", {}).get(TokenizerIdentity.__name__)
        trainer.load_state_dict(
            {
                "step": start.step,
                "consumed": start.init.consumed(start.checkpoint.manifest),
                "callbacks": {TokenizerIdentity.__name__: identity},
            }
        )
