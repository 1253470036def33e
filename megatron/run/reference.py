"""The reference model of a run, for objectives that compare with one: a pass of the run's own engine over what the run
will read, before its first step.

The reference has the weights that the run begins with, never those of its checkpoints. Its log-probabilities are kept
by `read_ahead`. A run that is resumed finds everything; one that was made longer loads the weights that it began with
once more, for what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from megatron.checkpoint.agreement import broadcast, together
from megatron.checkpoint.find import Checkpoint, open_checkpoint
from megatron.checkpoint.hugging_face import published_identity
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.rng import random_state, restore_random_state
from megatron.checkpoint.start import Start
from megatron.data.order.data_plan import Datasets
from megatron.data.reference import REFERENCE, ReferenceStore
from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import content_key
from megatron.data.tokens.indexed import identify
from megatron.errors import UserError
from megatron.inference.live import live_stage
from megatron.inference.log_probabilities import log_probabilities
from megatron.layers.lora import switched_off
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.run.data import reference_folder
from megatron.run.read_ahead import EXCHANGED, ReadAhead
from megatron.run.start import restore
from megatron.tokenizer.base import Tokenizer
from megatron.training.callback import Callback
from megatron.training.setup import build_objective
from megatron.training.trainer import Trainer

VERSION = 2  # part of every folder's name: raise it when the numbers change

logger = get_logger(__name__)


@dataclass(frozen=True)
class Origin:
    """The weights that a run began with.

    Attributes:
        key: hash of what their log-probabilities depend on besides the rows.
        weights: hash of the weights alone.
        checkpoint: the folder of the checkpoint that had them; None: they were new.
        kind, init: of the start that took them (`Start.kind`, the keys of `init_from`).
    """

    key: str
    weights: str
    checkpoint: str | None
    kind: str
    init: dict[str, Any] | None = None


class Reference(Callback):
    """Fills the store before the first step. Keeps the origin with each checkpoint."""

    def __init__(
        self,
        args: NeoXArgs,
        start: Start,
        tokenizer: Tokenizer,
        datasets: Datasets,
        begun: int,
        exchanged: Mapping[str, SampleDataset],
    ) -> None:
        """`begun`: samples of the training data that the run has read. `exchanged`: of each role the same samples with
        other answers, which are compared as well; {} for none."""
        self.start_at = start
        saved = start.checkpoint.callbacks.get(type(self).__name__) if start.checkpoint and start.resumes else None
        self.resumed = saved is not None
        self.origin = Origin(**saved) if saved is not None else _origin(args, start, tokenizer)
        folder = reference_folder(args, datasets.plan) / f"reference-{self.origin.key[:16]}"
        self.store = ReferenceStore(folder, args.model.seq_length)
        compared = {
            **datasets.compared(),
            **{f"{role}{EXCHANGED}": dataset for role, dataset in exchanged.items()},
        }
        what = "log-probabilities of the reference model"
        self.ahead = ReadAhead(args, tokenizer, datasets, compared, begun, self.store, what)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.origin)

    def loaded(self, trainer: Trainer) -> None:
        state = trainer.state
        missing = self.ahead.missing(state)
        if not missing:
            return
        count = sum(map(len, missing.values()))
        logger.info(f"the reference model reads {count:,} samples before the first step, into {self.store.folder}")
        with trainer.progress.during("evaluation"):
            if self.resumed:
                self._load_origin(trainer)
            before = random_state()
            with trainer.engine.evaluating(), switched_off(trainer.engine.module):
                says = partial(log_probabilities, live_stage(trainer.engine, trainer.args))
                self.ahead.fill(missing, state, says, trainer.progress.beat, asdict(self.origin))
            restore_random_state(before)
            if self.resumed:
                restore(trainer, self.start_at)
        self.ahead.finish(state)

    def _load_origin(self, trainer: Trainer) -> None:
        """The weights that the run began with. Raises `UserError` when they are not there any more."""
        origin, checkpoint, state = self.origin, None, trainer.state
        lacks = f"{self.store.folder} lacks reference log-probabilities of samples that this run will read"
        with together("opening the checkpoint of the reference", state):
            if origin.checkpoint is None:
                raise UserError(
                    f"{lacks}, and it began with new weights, which no file has. Copy the folder back from where the "
                    "run was, or do not make the run longer."
                )
            if state.rank == 0:
                checkpoint = open_checkpoint(origin.checkpoint)
                if weights_of(checkpoint) != origin.weights:
                    raise UserError(f"{lacks}, and {origin.checkpoint} is not what the run began with any more")
        checkpoint = broadcast(checkpoint, state)
        logger.info(f"loading {origin.checkpoint} once more: {lacks}")
        restore(trainer, Start("finetune", checkpoint, 0, "", InitFrom.of(origin.init)), checksums=True)


def find_reference(
    args: NeoXArgs,
    start: Start,
    tokenizer: Tokenizer,
    datasets: Datasets,
    begun: int,
    exchanged: Mapping[str, SampleDataset],
) -> Reference | None:
    """The reference of a run; None where the objective reads none, or of texts that do not exist yet (rollouts), and
    where the data have it (`precompute_model_name`)."""
    given = args.data.precompute_model_name is not None
    if REFERENCE not in build_objective(args).reads or trains_on_rollouts(args.get) or given:
        return None
    return Reference(args, start, tokenizer, datasets, begun, exchanged)


def _origin(args: NeoXArgs, start: Start, tokenizer: Tokenizer) -> Origin:
    found = start.checkpoint
    model = {"model": asdict(args.model), "vocabulary": tokenizer.vocab_size}
    new = {**model, "seed": args.training.seed}  # of new weights, and of rows that a larger model adds
    weights = content_key(new) if found is None else weights_of(found)
    grown = start.init is not None and start.init.grows
    init = args.checkpoint.init_from if grown else None
    described = {"version": VERSION, "weights": weights, "precision": args.optimizer.precision, "eod": tokenizer.eod}
    described |= {"grown": [init, new]} if grown else model
    return Origin(content_key(described), weights, None if found is None else str(found.path), start.kind, init)


def weights_of(checkpoint: Checkpoint) -> str:
    """Hash of the checksums of the files with weights; GPT-NeoX's and Hugging Face's have none, so some of each is
    read."""
    manifest = checkpoint.manifest
    if checkpoint.published is not None:
        return content_key({"published": published_identity(checkpoint.path)})
    if not checkpoint.by_neox:
        names = sorted(name for name in manifest.files if name.startswith("layer_"))
        return content_key({name: asdict(manifest.files[name]) for name in names})
    files = sorted(path for path in checkpoint.path.glob("*.pt") if "optim" not in path.name)
    return content_key({path.name: identify(path)[1:] for path in files})
