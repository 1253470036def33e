"""What a run reads, once its data are opened, divided and counted: `DataPlan`, and the `Datasets` that it builds.

The plan's `state()` is stored in every checkpoint and comes back as `saved`: it keeps the order of a run's samples when
the run is made longer or gets other data for later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.order.by_step import ByStep, SourceCounts
from megatron.data.order.mixture import Mixture, ReadOnce
from megatron.data.order.role_order import RoleOrder
from megatron.data.order.saved_order import SavedOrder
from megatron.data.order.table import SourceRow, source_rows
from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import IndexCaches, content_key
from megatron.data.tokens.indexed import FileIdentity, IndexedDataset, identify
from megatron.data.tokens.manifest import TURN_ENDS, check_tokenizer, read_manifest, verify
from megatron.log import Once, get_logger
from megatron.neox_arguments.forget_steps import FORGET, SOURCES, TRAIN
from megatron.tokenizer.base import Tokenizer

SET = "valid/"  # before the name of a validation set, where roles have names


@dataclass(frozen=True)
class SetSteps:
    """How a validation set is evaluated: its first `samples` samples in `steps` batches, the same every time."""

    name: str
    tags: tuple[str, ...]
    samples: int
    steps: int


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for a role without data or samples. `valid_sets` are those with names."""

    plan: DataPlan
    train: SampleDataset | None = None
    valid: SampleDataset | None = None
    test: SampleDataset | None = None
    valid_sets: Mapping[str, SampleDataset] = field(default_factory=dict)

    def by_role(self) -> dict[str, SampleDataset]:
        """All datasets, by the names of `DataPlan.roles`."""
        roles = {"train": self.train, "valid": self.valid, "test": self.test}
        there = {name: dataset for name, dataset in roles.items() if dataset is not None}
        return there | {f"{SET}{name}": dataset for name, dataset in self.valid_sets.items()}

    def compared(self) -> dict[str, SampleDataset]:
        """Those that an objective compares with a reference model: all, but of a run that unlearns the forget data."""
        if not isinstance(self.train, ByStep):
            return self.by_role()
        return {name: dataset for name, dataset in self.train.sources.items() if name == FORGET}

    def digest(self, arrays: bool = False) -> str:
        """Hash of the order of all samples, for ranks to compare. With `arrays` of the index arrays themselves, which
        are read for it; else of what they are made from (sizes, ranges, seeds, weights)."""
        roles = self.plan.state()["roles"]
        for role in roles.values():
            for source in role["sources"]:
                del source["prefix"]  # may differ between nodes
                source["files"] = [identity for _, *identity in source["files"]]
        found = {name: dataset.digest() for name, dataset in self.by_role().items()} if arrays else {}
        return content_key({"roles": roles, "arrays": found})


@dataclass(frozen=True)
class DataPlan:
    """What a run will read.

    Attributes:
        seq_length: inputs per sample.
        batch: samples per step.
        roles: train, valid, test, `valid/<name>` for each of `sets`, and what steps of unlearning read. A role without
            data or samples is left out.
        sets: the validation sets with names.
        start: the run's first step, and the samples consumed before it (`Progress`).
        caches: keep the index arrays.
        counts: what the steps of training take from which role; None: all from train.
    """

    seq_length: int
    batch: int
    roles: Mapping[str, RoleOrder]
    sets: tuple[SetSteps, ...] = ()
    start: tuple[int, int] = (0, 0)
    caches: IndexCaches = field(default_factory=IndexCaches, compare=False)
    counts: SourceCounts | None = None

    def table(self) -> list[SourceRow]:
        """One row per role and source."""
        return [row for name, role in self.roles.items() for row in source_rows(name, role)]

    def notes(self) -> list[str]:
        """Lines for the log about documents that are left out, cut or padded."""
        planned = [(name, role.sources[d]) for name, role in self.roles.items() for d in role.drawn]
        return [
            f"{source.source.data.prefix} ({name}): {note}"
            for name, source in planned
            for note in source.packing.notes()
        ]

    def state(self, step: int = 0) -> dict[str, Any]:
        """JSON-able record of the sample order, for the checkpoint after `step` steps."""
        taken = self.counts.at(step) if self.counts is not None else {}
        return SavedOrder({name: role.save() for name, role in self.roles.items()}, self.start, taken=taken).write()

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """See `manifest.check_tokenizer`."""
        once = Once(get_logger(__name__))
        planned = [source.source.data for role in self.roles.values() for source in role.sources]
        for data in {data.prefix: data for data in planned}.values():
            check_tokenizer(data, tokenizer, once)

    def check_content(self) -> None:
        """See `manifest.verify`: of every dataset that has a manifest, its labels too."""
        for part in self._parts():
            verify(part)

    def _parts(self) -> list[IndexedDataset]:
        """All that is read, each file once."""
        opened = [data for role in self.roles.values() for source in role.sources for data in source.source.opened]
        return list({part.prefix: part for one in opened for part in one.parts}.values())

    @cached_property
    def turn_ends(self) -> list[int]:
        """The tokens that end a turn in the chats of the training data, ascending."""
        train = self.roles.get("train")
        drawn = [] if train is None else [train.sources[d].source.data for d in train.drawn]
        parts = [part for data in drawn for part in data.parts]
        manifests = [read_manifest(part.prefix) for part in parts]
        return sorted({i for found in manifests if found is not None for i in found.extra.get(TURN_ENDS, ())})

    @cached_property
    def files(self) -> list[FileIdentity]:
        """The files of tokens and labels, and their indices, each once."""
        parts = self._parts()
        indices = [path for part in parts if (path := Path(f"{part.prefix}.idx")).is_file()]
        return [*(file for part in parts for file in part.identity), *map(identify, indices)]

    def build(self, *, mmap_warmup: bool = False) -> Datasets:
        """Build or find the index arrays. Any number of processes may call this at the same time.

        Args:
            mmap_warmup: read the whole token files once now.
        """
        built = {name: self._build(role, mmap_warmup) for name, role in self.roles.items()}
        sets = {
            one.name: ReadOnce(built.pop(f"{SET}{one.name}"), one.samples, one.steps * self.batch) for one in self.sets
        }
        parts = {source: built.pop(source) for source in SOURCES if source in built and self.counts is not None}
        if self.counts is not None and parts:
            built[TRAIN] = ByStep(self.counts, parts)
        return Datasets(self, **built, valid_sets=sets)

    def _build(self, role: RoleOrder, mmap_warmup: bool) -> SampleDataset:
        drawn = role.drawn
        if mmap_warmup:
            for d in drawn:
                role.sources[d].source.data.warm_up()
        datasets = [role.sources[d].dataset() for d in drawn]
        if len(datasets) == 1:
            return datasets[0]
        return Mixture(
            datasets,
            [phase.select(drawn) for phase in role.reached],
            role.samples,
            self.caches.of(role.sources[drawn[0]].source.data.prefix),
            [role.sources[d].source.name for d in drawn],
        )
