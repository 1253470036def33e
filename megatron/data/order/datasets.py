"""From the data keys of a config to the datasets of a run.

`plan_datasets` opens the files, divides them and counts: cheap, without torch, enough for a dry run and for the table
at start. `DataPlan.build` then builds the index arrays, or finds them in the cache.

The plan's `state()` is stored in every checkpoint and comes back as `saved`: it keeps the order of a run's samples when
the run is made longer or gets other data for later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.data.order.mixture import Mixture, ReadOnce
from megatron.data.order.phases import Progress
from megatron.data.order.role_order import OrderBuilder, RoleOrder, packing_of
from megatron.data.order.saved_order import SavedOrder
from megatron.data.order.sources import find_sources
from megatron.data.order.splits import NAMES
from megatron.data.order.table import SourceRow, source_rows
from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import IndexCaches, content_key
from megatron.data.tokens.manifest import TURN_ENDS, check_tokenizer, read_manifest, verify
from megatron.log import Once, get_logger
from megatron.neox_arguments.schema_data import DataConfig
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
        roles: train, valid, test, and `valid/<name>` for each of `sets`. A role without data or samples is left out.
        sets: the validation sets with names.
        start: the run's first step, and the samples consumed before it (`Progress`).
        caches: keep the index arrays.
    """

    seq_length: int
    batch: int
    roles: Mapping[str, RoleOrder]
    sets: tuple[SetSteps, ...] = ()
    start: tuple[int, int] = (0, 0)
    caches: IndexCaches = field(default_factory=IndexCaches, compare=False)

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

    def state(self) -> dict[str, Any]:
        """JSON-able record of the sample order, for checkpoints."""
        return SavedOrder({name: role.save() for name, role in self.roles.items()}, self.start).write()

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """See `manifest.check_tokenizer`."""
        once = Once(get_logger(__name__))
        planned = [source.source.data for role in self.roles.values() for source in role.sources]
        for data in {data.prefix: data for data in planned}.values():
            check_tokenizer(data, tokenizer, once)

    def check_content(self) -> None:
        """See `manifest.verify`: of every dataset that has a manifest, its labels too."""
        sources = [source.source for role in self.roles.values() for source in role.sources]
        opened = [data for one in sources for data in (one.data, one.labels) if data is not None]
        for data in {part.prefix: part for one in opened for part in one.parts}.values():
            verify(data)

    def turn_ends(self) -> list[int]:
        """The tokens that end a turn in the chats of the training data, ascending."""
        train = self.roles.get("train")
        drawn = [] if train is None else [train.sources[d].source.data for d in train.drawn]
        parts = [part for data in drawn for part in data.parts]
        manifests = [read_manifest(part.prefix) for part in parts]
        return sorted({i for found in manifests if found is not None for i in found.extra.get(TURN_ENDS, ())})

    def build(self, *, mmap_warmup: bool = False) -> Datasets:
        """Build or find the index arrays. Any number of processes may call this at the same time.

        Args:
            mmap_warmup: read the whole token files once now.
        """
        built = {name: self._build(role, mmap_warmup) for name, role in self.roles.items()}
        sets = {
            one.name: ReadOnce(built.pop(f"{SET}{one.name}"), one.samples, one.steps * self.batch) for one in self.sets
        }
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


def plan_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    set_samples: int = 0,
    progress: Progress | None = None,
    saved: SavedOrder | None = None,
) -> DataPlan:
    """Open, divide and count the data of a run.

    Args:
        data: the data keys.
        seq_length: tokens per sample.
        seed: of the shuffles; `saved` segments keep the seed they had.
        train_samples, valid_samples, test_samples: over the whole run, from its first step on.
        set_samples: of each validation set with a name, in every evaluation; 0 leaves them out.
        progress: samples per step and how far the run is; by default at the beginning, one sample per step.
        saved: the order in the checkpoint that is resumed.

    Raises `UserError`: files missing or damaged, too few tokens, weights that do not fit, caps that are too low,
    changes of the data or weights of past steps.
    """
    caches, progress = IndexCaches(data.data_cache_path, data.use_shared_fs), progress or Progress()
    wanted = dict(zip(NAMES, (train_samples, valid_samples, test_samples), strict=True))
    names = [name for name in NAMES if wanted[name] > 0 or (name == "valid" and set_samples > 0)]
    found = find_sources(data, names, seq_length, caches)
    builder = OrderBuilder(data, seq_length, seed, progress, saved or SavedOrder(), caches)
    roles: dict[str, RoleOrder] = {}
    for name, sources in found.roles.items():
        if sources.sources and wanted[name] > 0:
            order = builder.order_training if name == "train" else builder.order_other
            roles[name] = order(name, sources, wanted[name])
    sets = []
    for one in found.valid_sets if set_samples > 0 else ():
        role = builder.order_once(f"{SET}{one.source.name}", one.source, set_samples)
        roles[f"{SET}{one.source.name}"] = role
        sets.append(SetSteps(one.source.name, one.tags, role.samples, -(-role.samples // progress.batch)))
    return DataPlan(seq_length, progress.batch, roles, tuple(sets), progress.start, caches)


def build_datasets(data: DataConfig, **counts: Any) -> Datasets:
    """`plan_datasets` with the same arguments, then `DataPlan.build` with what the data keys say about it."""
    plan = plan_datasets(data, **counts)
    return plan.build(mmap_warmup=data.mmap_warmup)


def epoch_samples(data: DataConfig, seq_length: int, epochs: int = 1) -> int:
    """Training samples in `epochs` passes over all data that is trained on: what `train_epochs` is counted in."""
    caches = IndexCaches(data.data_cache_path, data.use_shared_fs)
    train = find_sources(data, ["train"], seq_length, caches).roles["train"]
    drawn = [d for d in range(len(train.sources)) if any(weights[d] > 0 for _, weights in train.weights)]
    return sum(packing_of(data, train.sources[d], seq_length, caches).samples_per_epoch(epochs) for d in drawn)
