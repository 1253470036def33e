"""Has checkpoints written when they are due, and old ones deleted once a new one is complete."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.checkpoint import layout
from megatron.checkpoint.agreement import await_thread
from megatron.checkpoint.attempt import SaveError
from megatron.checkpoint.background import BackgroundSave, aside
from megatron.checkpoint.base import base_entry
from megatron.checkpoint.cadence import is_save_step
from megatron.checkpoint.find import abandon_after, list_checkpoints
from megatron.checkpoint.folder import write_latest
from megatron.checkpoint.host_memory import HostMemory
from megatron.checkpoint.manifest import BaseEntry
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.retention import apply_retention
from megatron.checkpoint.save import Save, check_finite
from megatron.errors import LostRankError, NumericsError
from megatron.log import get_logger
from megatron.mpu.state import HOST_SECONDS, ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.settled import Settled
    from megatron.training.trainer import Trainer

logger = get_logger(__name__)

# A loss beyond this many times that of the first step says that the weights are ruined: an untrained model is better.
ABSURD = 10.0


# What ranks vote for: a checkpoint is still being written; it is time for a temporary one.
WRITING, TEMPORARY = "a checkpoint is being written", "a temporary checkpoint is due"
# After an error: for the checkpoint under way, without and with the ranks that write it too.
LOST_SECONDS, ERROR_SECONDS = 5.0, 600.0


@CALLBACKS.register(
    "checkpointer",
    phase="save",
    idle={"save": None},
    keys=(
        "checkpoint_factor",
        "extra_save_iters",
        "keep_last_n_checkpoints",
        "async_save",
        "temporary_checkpoint_minutes",
    ),
    loses="no checkpoint is written, not even when the run stops",
)
class Checkpointer(Callback):
    """Saves to `save` at the steps of `checkpoint_factor` and `extra_save_iters`, at the end, and when stopping.

    With `async_save` the loop waits for a copy in the host's memory, and a thread of each rank writes it. The next save
    and the end of the run wait for the threads; what one fails with is raised on every rank. Everything that hears of a
    checkpoint (`saved_step`, the hook `saved`) hears of it when it is complete.

    `temporary_checkpoint_minutes` after the last one a checkpoint is saved that goes when a later one is complete.

    A skipped update leaves the weights as they were, so it is no reason not to save. Weights that are not finite end
    the run instead of being saved (exit code 4).

    A checkpoint is *good* once its weights have taken a step whose loss and gradient were finite, and whose loss was
    not absurd: the update that made them did not ruin them. No loss is absurd of an objective that does not count
    tokens: it may be of any size. The newest good one is never deleted, and is what `latest` names again when bad
    numbers end the run.

    Args:
        root: the `save` folder.
        config_files: name -> text of the YAML files the run was started with.
        vocab_size: of the model.

    Attributes:
        good: step of the newest good checkpoint; None when there is none.
        first_loss: loss of the first step, the measure of what is absurd.
    """

    def __init__(self, root: Path, config_files: dict[str, str], vocab_size: int = 0) -> None:
        self.root = root
        self.vocab_size = vocab_size
        self.config_files = config_files
        self.good: int | None = None
        self.first_loss: float | None = None
        self._ruined: int | None = None
        self._sound: int | None = None  # as `good`, but perhaps not complete yet
        self._last: Settled | None = None
        self._aside: ParallelState | None = None
        self._memory: HostMemory | None = None
        self._writing: BackgroundSave | None = None
        self._saved_at = time.monotonic()
        self._temporary: set[int] | None = None  # None: not looked up
        self._began: int | None = None  # at which step, until a save follows

    @classmethod
    def build(cls, context: RunContext) -> Checkpointer:
        return cls(Path(context.args.checkpoint.save), config_texts(context.args), context.vocab_size)

    def start(self, trainer: Trainer) -> None:
        options = trainer.args.checkpoint
        if options.async_save:
            limits = trainer.args.parallel.distributed_timeout
            self._aside = aside(trainer.state, max(limits or 0.0, HOST_SECONDS))
            self._memory = HostMemory(locked=trainer.state.device.type == "cuda")
            trainer.voters[WRITING] = lambda: self._writing is not None and self._writing.running
        if (minutes := options.temporary_checkpoint_minutes) is not None and minutes > 0:
            trainer.voters[TEMPORARY] = lambda: time.monotonic() - self._saved_at >= 60 * minutes

    def loaded(self, trainer: Trainer) -> None:
        self._temporary = None
        # A run that went back judges the checkpoints that it writes again, and forgets those that they replace.
        self._ruined = self._sound = self._last = trainer.saved_step = None
        if trainer.step > 0:
            trainer.saved_step = trainer.step  # it was read from a checkpoint; the same one is not written again
        elif 0 in (trainer.args.checkpoint.extra_save_iters or ()):
            self.save(trainer)
        self._saved_at, self._began = time.monotonic(), trainer.step

    def settled(self, trainer: Trainer, step: Settled) -> None:
        self._last = step
        if not step.skipped:
            self._judge(trainer, step)

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        # Ranks voted at the start of the step: in the one after which a save began, nobody was asked about it.
        if self._writing is not None and trainer.step > self._writing.step and WRITING not in trainer.voted:
            self._complete(trainer)
        if self._is_due(trainer, trainer.step):
            self.save(trainer)
        elif TEMPORARY in trainer.voted and not self._ends(trainer):
            self.save(trainer, temporary=True)

    def _ends(self, trainer: Trainer) -> bool:
        """Whether this is the last step, whose checkpoint is to last."""
        stops = trainer.stop_reason is not None or trainer.voted & trainer.ends
        return bool(stops) or trainer.step >= (trainer.args.training.train_iters or 0)

    def _is_due(self, trainer: Trainer, step: int) -> bool:
        """Whether a checkpoint of this step is to last."""
        options = trainer.args.checkpoint
        return is_save_step(
            step, scale=options.checkpoint_scale, factor=options.checkpoint_factor, extra=options.extra_save_iters
        )

    def end(self, trainer: Trainer) -> None:
        if trainer.step == 0:
            self.drain(trainer)
            return
        self.save(trainer)
        self.drain(trainer)
        last = self._last
        if trainer.stop_reason is None and last is not None and not last.skipped and self._sane(trainer, last):
            self.good = trainer.step  # as far as it can be known: no step follows
            self._delete_old(trainer)

    def error(self, trainer: Trainer, error: BaseException) -> None:
        self._finish_after(trainer, error)
        if trainer.state.rank != 0 or not isinstance(error, NumericsError) or self.good in (None, trainer.saved_step):
            return
        if self.good in list_checkpoints(self.root).steps:
            write_latest(self.root, self.good)
            logger.warning(
                f"{self.root}/latest names the checkpoint of iteration {self.good} again, so the run resumes there: "
                "no good step followed the newer ones"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"good": self.good, "first_loss": self.first_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.good, self.first_loss = state["good"], state["first_loss"]

    def _judge(self, trainer: Trainer, step: Settled) -> None:
        """A step was taken with the weights of the newest checkpoint: whether it shows that they are good."""
        newest = trainer.saved_step if self._writing is None else self._writing.step
        if trainer.plan.forgets(step.step - 1) and math.isfinite(step.loss):
            return  # its loss is of other data, and may be raised
        if self.first_loss is None:
            self.first_loss = step.loss
        if newest in (None, self.good, self._sound, self._ruined):
            return
        if self._sane(trainer, step):
            self._sound = newest
            self._trust(trainer)
            return
        self._ruined = newest
        if trainer.state.rank == 0:
            kept = "" if self.good is None else f"; that of iteration {self.good} is kept"
            than = f", more than {ABSURD:g} times that of the first step ({self.first_loss:g})"
            logger.warning(
                f"the loss of iteration {step.step} is {step.loss:g}{than if math.isfinite(step.loss) else ''}: "
                f"the checkpoint of iteration {newest} holds ruined weights{kept}"
            )

    def _trust(self, trainer: Trainer) -> None:
        """The newest checkpoint is good if it is sound and complete."""
        if self._sound is not None and self._sound == trainer.saved_step:
            self.good, self._sound = self._sound, None
            self._delete_old(trainer)

    def _sane(self, trainer: Trainer, step: Settled) -> bool:
        per_token = trainer.engine.objective.counts[0] == "tokens"
        most = ABSURD * max(abs(self.first_loss), 1.0) if per_token and self.first_loss is not None else math.inf
        return math.isfinite(step.loss) and step.loss <= most

    def save(self, trainer: Trainer, *, temporary: bool = False) -> None:
        """Write a checkpoint of this step, unless it exists. Collective over all ranks.

        Raises `NumericsError` when the weights are not finite.
        """
        self.drain(trainer)
        if trainer.saved_step == trainer.step:
            return
        trainer.settle()  # what is saved knows of all its steps, and what follows is judged by later ones
        self._saved_at = time.monotonic()
        with trainer.progress.during("checkpoint"), _naming_the_newest(trainer):
            if self._memory is not None and self._aside is not None:
                save = self._begin(trainer, temporary)
                self._writing = BackgroundSave(save, self._aside)
                save.copy(self._memory, self._writing.beat)
                self._writing.start()
                return
            check_finite(trainer.engine.not_finite(), trainer.step, trainer.state)
            path = self._begin(trainer, temporary).write(trainer.state)
        trainer.progress.save_seconds = time.monotonic() - self._saved_at
        self._announce(trainer, trainer.step, path, temporary)

    def _begin(self, trainer: Trainer, temporary: bool) -> Save:
        options, began, self._began = trainer.args.checkpoint, self._began, None
        if trainer.state.rank == 0 and began is not None:
            with suppress(OSError):  # a full disk is for the save to report
                abandon_after(self.root, began)
        return Save(
            self.root,
            trainer.step,
            trainer.engine,
            trainer.state,
            heads=Heads.of(trainer.args.model),
            consumed=trainer.consumed,
            client=trainer.state_dict(),
            config=trainer.args.to_dict(),
            config_files=self.config_files,
            save_optim=not options.no_save_optim,
            save_rng=not options.no_save_rng,
            temporary=temporary,
            base=self._base(trainer),
        )

    def _base(self, trainer: Trainer) -> BaseEntry | None:
        """What has the weights that are not trained, and so are not saved."""
        post, vocabulary = trainer.args.post, self.vocab_size
        return None if post.lora_base is None or post.lora_save_base else base_entry(post.lora_base, vocabulary)

    def drain(self, trainer: Trainer) -> None:
        """Wait until the checkpoint under way, if there is one, is complete. Collective over all ranks."""
        writing, signs = self._writing, -1
        if writing is None:
            return
        with trainer.progress.during("checkpoint"):
            for _ in await_thread(writing.thread if writing.running else None, trainer.state):
                if writing.signs != signs:  # one that hangs gives none
                    signs = writing.signs
                    trainer.progress.beat()
        self._complete(trainer)

    def _complete(self, trainer: Trainer) -> None:
        """The threads of all ranks have ended. Raises on all of them what they failed with."""
        writing, self._writing = self._writing, None
        assert writing is not None
        with _naming_the_newest(trainer):
            path = writing.result()
        # A stop may have to wait for one that has just begun, and then for its own.
        trainer.progress.save_seconds = 2 * writing.seconds
        self._announce(trainer, writing.step, path, writing.temporary)

    def _announce(self, trainer: Trainer, step: int, path: Path, temporary: bool) -> None:
        """A checkpoint is complete."""
        trainer.saved_step = step
        if self._temporary is not None:
            self._temporary.discard(step)
            self._temporary.update({step} if temporary else ())
        trainer.call("saved", str(path))
        self._delete_old(trainer)
        self._trust(trainer)

    def _finish_after(self, trainer: Trainer, error: BaseException) -> None:
        """Give the checkpoint under way its time although the run ends by an error. Its threads on all ranks do so."""
        writing, self._writing = self._writing, None
        if writing is None or not isinstance(error, Exception):
            return
        until = time.monotonic() + (LOST_SECONDS if isinstance(error, LostRankError) else ERROR_SECONDS)
        signs = -1
        while writing.running and time.monotonic() < until:
            writing.thread.join(0.2)
            if writing.signs != signs:
                signs = writing.signs
                trainer.progress.beat()
        try:
            if writing.running:
                raise SaveError(f"it was not complete {ERROR_SECONDS:g} seconds after the error")
            path = writing.result()
        except Exception as other:  # the error that ends the run is what counts
            logger.warning(f"the checkpoint of iteration {writing.step} was being written and is lost: {other}")
            return
        logger.info(f"saved checkpoint {path}")
        trainer.saved_step = writing.step
        if self._sound == writing.step:
            self.good = writing.step

    def _delete_old(self, trainer: Trainer) -> None:
        options = trainer.args.checkpoint
        if trainer.state.rank == 0:
            kept = {*(options.extra_save_iters or ()), *set().union(*trainer.held_checkpoints.values())}
            if self._temporary is None:
                found = list_checkpoints(self.root).checkpoints
                self._temporary = {step for step in found if found[step].manifest.temporary}
            temporary = {step for step in self._temporary if not self._is_due(trainer, step)}
            for step in apply_retention(self.root, options.keep_last_n_checkpoints, kept, self.good, temporary):
                why = "temporary_checkpoint_minutes" if step in temporary else "keep_last_n_checkpoints"
                self._temporary.discard(step)
                logger.info(f"deleted the checkpoint of iteration {step} ({why})")


@contextmanager
def _naming_the_newest(trainer: Trainer) -> Iterator[None]:
    """Weights that are not finite: the message says what there is instead of them."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(f"{error}, and {_newest(trainer)}") from error


def _newest(trainer: Trainer) -> str:
    newest = trainer.saved_step
    return "nothing is saved" if newest is None else f"the newest checkpoint is of iteration {newest}"


def config_texts(args: NeoXArgs) -> dict[str, str]:
    """name -> text of the YAML files that the values came from, as far as they can be read from here."""
    files = {source.rsplit(":", 1)[0] for source in args.sources.values() if ":" in source}
    found: dict[str, str] = {}
    for path in sorted(files):
        if path.endswith((".yml", ".yaml", ".json")) and os.path.isfile(path):
            found[_free_name(path, {layout.RESOLVED, *found})] = Path(path).read_text(encoding="utf-8")
    return found


def _free_name(path: str, taken: set[str]) -> str:
    """A file's name, with as many of its folders in front as nobody else has: `b-run.yml` after `a/run.yml`."""
    parts = Path(path).absolute().parts[1:]
    names = ("-".join(parts[-depth:]) for depth in range(1, len(parts) + 1))
    return next((name for name in names if name not in taken), f"{len(taken)}-{parts[-1]}")
