"""The reference model of a run, for objectives that compare with one: a pass of the run's own engine over what the run
will read, before its first step.

The reference has the weights that the run begins with, never those of its checkpoints. Its log-probabilities are kept
(`data/reference.py`) in a folder that is named by the weights and by what else the numbers depend on. A pass that was
interrupted goes on where it was. A run that is resumed finds everything; one that was made longer loads the weights
that it began with once more, for what is missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.agreement import broadcast, together
from megatron.checkpoint.attempt import free_bytes
from megatron.checkpoint.find import Checkpoint, open_checkpoint
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.rng import random_state, restore_random_state
from megatron.checkpoint.start import Start
from megatron.data.loader import StepLoader
from megatron.data.order.data_plan import Datasets
from megatron.data.order.mixture import ReadOnce
from megatron.data.reference import REFERENCE, ReferenceStore, Selected, StoreWriter, row_key, rows_of
from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import content_key
from megatron.data.tokens.indexed import identify
from megatron.errors import MachineError, NumericsError, UserError
from megatron.files import read_json, write_atomically
from megatron.inference.live import live_stage
from megatron.inference.log_probabilities import log_probabilities
from megatron.layers.lora import switched_off
from megatron.log import get_logger, progress
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.forget_steps import TRAIN
from megatron.neox_arguments.rules_rollouts import trains_on_rollouts
from megatron.run.data import collate_rules, reference_folder
from megatron.run.start import restore
from megatron.tokenizer.base import Tokenizer
from megatron.training.callback import Callback
from megatron.training.partition_comm import all_gather
from megatron.training.setup import build_objective
from megatron.training.trainer import Trainer

VERSION = 2  # part of every folder's name: raise it when the numbers change
EXCHANGED = " with other answers"
COMMIT_SECONDS = 30.0  # how much of a pass is lost at most

logger = get_logger(__name__)

Missing = dict[str, list[int]]
"""By role, the numbers of the items of which a row is not there."""


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
        self.start_at, self.tokenizer, self.datasets, self.begun = start, tokenizer, datasets, begun
        self.compared = {
            **datasets.compared(),
            **{f"{role}{EXCHANGED}": dataset for role, dataset in exchanged.items()},
        }
        saved = start.checkpoint.callbacks.get(type(self).__name__) if start.checkpoint and start.resumes else None
        self.resumed = saved is not None
        self.origin = Origin(**saved) if saved is not None else _origin(args, start, tokenizer)
        folder = reference_folder(args, datasets.plan) / f"reference-{self.origin.key[:16]}"
        self.store = ReferenceStore(folder, args.model.seq_length)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.origin)

    def loaded(self, trainer: Trainer) -> None:
        state, missing = trainer.state, Missing()
        with together("looking for reference log-probabilities", state):
            if state.rank == 0:
                missing = self._missing()
                self._check_room(missing)
        missing = broadcast(missing, state)
        if not missing:
            logger.info(f"log-probabilities of the reference model are in {self.store.folder}")
            return
        count = sum(map(len, missing.values()))
        logger.info(f"the reference model reads {count:,} samples before the first step, into {self.store.folder}")
        with trainer.progress.during("evaluation"):
            if self.resumed:
                self._load_origin(trainer)
            before = random_state()
            with trainer.engine.evaluating(), switched_off(trainer.engine.module):
                for role, numbers in missing.items():
                    self._pass(trainer, role, numbers)
            restore_random_state(before)
            if self.resumed:
                restore(trainer, self.start_at)
        self.store.refresh()
        with together("reading reference log-probabilities", state):
            if not len(self.store):
                raise UserError(f"{self.store.folder} is not on a file system that all nodes see; set reference_path")
            if state.rank == 0:
                self._note_whole(self._wanted())

    def _wanted(self) -> dict[str, range]:
        """The items that the run will read, by role."""
        plan = self.datasets.plan
        begun = {TRAIN: self.begun} if plan.counts is None else plan.counts.taken
        return {
            name: range(begun.get(_role(name), 0), min(len(dataset), plan.roles[_role(name)].samples))
            for name, dataset in self.compared.items()
        }

    def _missing(self) -> Missing:
        """What the run will read and the store does not have. A store that was found whole is not looked through again
        for the same order of the data."""
        wanted = self._wanted()
        if self._found_whole(wanted):
            return {}
        found: Missing = {}
        for name, dataset in self.compared.items():
            numbers = progress(wanted[name], what=f"looking for reference log-probabilities: {name}", unit="sample")
            if lacking := self.store.missing(dataset, numbers):
                found[name] = lacking
        if not found:
            self._note_whole(wanted)
        return found

    def _check_room(self, missing: Missing) -> None:
        """Raise `MachineError` where the rows will not fit on the disk."""
        rows = sum(len(numbers) * self.datasets.plan.roles[_role(name)].rows for name, numbers in missing.items())
        needed, free = rows * self.store.row_bytes, free_bytes(self.store.folder)
        if free < needed:
            raise MachineError(
                f"the log-probabilities of the reference model need {needed} bytes; {free} are free in "
                f"{self.store.folder}. Make room, or set reference_path to a folder on a larger disk"
            )

    @property
    def _note(self) -> Path:
        """Where it is noted which items of this order of the data the store was found to have."""
        exchanged = [dataset.digest() for name, dataset in self.compared.items() if _role(name) != name]
        order = content_key({"order": self.datasets.digest(), "exchanged": exchanged})
        return self.store.folder / f"whole-{order[:16]}.json"

    def _found_whole(self, wanted: Mapping[str, range]) -> bool:
        """Whether it was, for all of these items, and has lost no row since."""
        known: dict[str, Any] = {}
        with suppress(OSError, UserError):
            known = read_json(self._note)
        ranges = {name: known.get(name, [0, 0]) for name in wanted}
        there = all(ranges[name][0] <= one.start and one.stop <= ranges[name][1] for name, one in wanted.items())
        return there and len(self.store) >= known.get("rows", 0)

    def _note_whole(self, wanted: Mapping[str, range]) -> None:
        found = {name: [one.start, one.stop] for name, one in wanted.items()}
        with suppress(OSError):  # then the next start looks again
            write_atomically(self._note, json.dumps({**found, "rows": len(self.store)}))

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
                if _weights_of(checkpoint) != origin.weights:
                    raise UserError(f"{lacks}, and {origin.checkpoint} is not what the run began with any more")
        checkpoint = broadcast(checkpoint, state)
        logger.info(f"loading {origin.checkpoint} once more: {lacks}")
        restore(trainer, Start("finetune", checkpoint, 0, "", InitFrom.of(origin.init)), checksums=True)

    def _pass(self, trainer: Trainer, role: str, numbers: list[int]) -> None:
        """Log-probabilities of items, written by the rank of the last stage that is first in all else."""
        args, state = trainer.args, trainer.state
        micro, rows = args.training.train_micro_batch_size_per_gpu, self.datasets.plan.roles[_role(role)].rows
        batch = micro * state.dp_size
        dataset, steps = self.compared[role], -(-len(numbers) // batch)
        loader = StepLoader(
            ReadOnce(Selected(dataset, numbers), len(numbers), steps * batch),
            micro_batch=micro,
            gas=1,
            rules=collate_rules(args, self.tokenizer),
            dp_rank=state.dp_rank,
            dp_size=state.dp_size,
            num_workers=args.data.num_workers,
            rows=rows,
        )
        writes = state.is_last_stage and state.tp_rank == 0 and state.dp_rank == 0
        writer = _Writer(self.store.folder, self.origin) if writes else None
        stage, batches, what = live_stage(trainer.engine, args), loader.steps(), f"reference model on {role}"
        for step in progress(range(steps), what=what, unit="batch") if state.rank == 0 else range(steps):
            found = log_probabilities(stage, next(batches), trainer.progress.beat)
            values = None if found is None or state.tp_rank else _gather_data(found[0], trainer)
            if writer is not None and values is not None:
                writer.write(dataset, numbers[step * batch : (step + 1) * batch], values, rows)
        with together("writing reference log-probabilities", state):
            if writer is not None:
                writer.close()


class _Writer:
    """Writes what a pass gives."""

    def __init__(self, folder: Path, origin: Origin) -> None:
        name = f"{time.time_ns():x}-{os.uname().nodename}-{os.getpid()}"
        self._writer, self._committed = StoreWriter(folder, name), time.monotonic()
        write_atomically(folder / "model.json", json.dumps(asdict(origin), indent=1))

    def write(self, dataset: SampleDataset, numbers: list[int], values: Tensor, rows: int) -> None:
        """`values` `[items * rows, s]` of items, perhaps with more rows that fill the batch up."""
        host = values.cpu().numpy()
        for k, number in enumerate(numbers):
            item = dataset[number]
            for row, sample in enumerate(item if isinstance(item, tuple) else (item,)):
                if rows_of(sample):
                    self._writer.add(row_key(sample), host[k * rows + row])
        if not bool(torch.isfinite(values).all()):
            raise NumericsError("the reference model gives log-probabilities that are not finite")
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self._writer.commit()
            self._committed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


def _gather_data(values: Tensor, trainer: Trainer) -> Tensor:
    """`values` `[n, s]` of all data ranks, `[data ranks * n, s]`."""
    group, size = trainer.state.group("data"), trainer.state.dp_size
    if group is None:
        return values
    found = values.new_empty((size * len(values), *values.shape[1:]))
    all_gather(found, values.contiguous(), group=group)
    return found


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


def _role(name: str) -> str:
    """The role of what is compared."""
    return name.removesuffix(EXCHANGED)


def _origin(args: NeoXArgs, start: Start, tokenizer: Tokenizer) -> Origin:
    found = start.checkpoint
    model = {"model": asdict(args.model), "vocabulary": tokenizer.vocab_size}
    new = {**model, "seed": args.training.seed}  # of new weights, and of rows that a larger model adds
    weights = content_key(new) if found is None else _weights_of(found)
    grown = start.init is not None and start.init.grows
    init = args.checkpoint.init_from if grown else None
    described = {"version": VERSION, "weights": weights, "precision": args.optimizer.precision, "eod": tokenizer.eod}
    described |= {"grown": [init, new]} if grown else model
    return Origin(content_key(described), weights, None if found is None else str(found.path), start.kind, init)


def _weights_of(checkpoint: Checkpoint) -> str:
    """Hash of the checksums of the files with weights; GPT-NeoX's have none, so some of each is read."""
    manifest = checkpoint.manifest
    if not checkpoint.by_neox:
        names = sorted(name for name in manifest.files if name.startswith("layer_"))
        return content_key({name: asdict(manifest.files[name]) for name in names})
    files = sorted(path for path in checkpoint.path.glob("*.pt") if "optim" not in path.name)
    return content_key({path.name: identify(path)[1:] for path in files})
