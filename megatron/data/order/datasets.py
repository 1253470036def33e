"""From the data keys of a config to the datasets of a run.

`plan_datasets` opens the files, divides them and counts: cheap, without torch, enough for a dry run and for the table
at start. `DataPlan.build` then makes the index arrays, or finds them in the cache.

The plan's `state()` belongs into every checkpoint and comes back as `frozen`: it keeps the order of a run's samples
when the run is made longer, or is given other data for the time to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.order.frozen import read_state, write_state
from megatron.data.order.mixture import Mixture, SampleSource
from megatron.data.order.padded import Padded
from megatron.data.order.phases import Progress
from megatron.data.order.role_plan import RolePlan, RolePlanner, SourcePlan, packing_of
from megatron.data.order.sources import find_sources
from megatron.data.order.splits import NAMES
from megatron.data.packing.contract import PackedSource
from megatron.data.tokens.cache import IndexCaches, content_key
from megatron.data.tokens.manifest import check_tokenizer
from megatron.log import Once, get_logger
from megatron.neox_arguments.schema_data import DataConfig
from megatron.tokenizer.base import Tokenizer

SET = "valid/"  # before the name of a validation set, where roles have names


@dataclass(frozen=True)
class SourceRow:
    """A line of the table at start.

    Attributes:
        role: train, valid, test, or `valid/` and the name of a validation set.
        samples, epochs: what the run draws, and how often that reads the source.
        weight: over the whole run; `weights`: in each phase, which begin at `steps`.
        unreached: the steps of phases that begin behind the end of the run.
    """

    role: str
    name: str
    prefix: str
    documents: int
    tokens: int
    weight: float
    weights: tuple[float, ...]
    steps: tuple[int, ...]
    samples: int
    epochs: float
    unreached: tuple[int, ...] = ()


@dataclass(frozen=True)
class SetPlan:
    """How a validation set is evaluated: its first `samples` samples in `steps` batches, the same every time."""

    name: str
    tags: tuple[str, ...]
    samples: int
    steps: int


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for a role without data or samples. `valid_sets` are those with names."""

    plan: DataPlan
    train: SampleSource | None = None
    valid: SampleSource | None = None
    test: SampleSource | None = None
    valid_sets: Mapping[str, SampleSource] = field(default_factory=dict)

    def by_role(self) -> dict[str, SampleSource]:
        """All that there is, by the names of `DataPlan.roles`."""
        roles = {"train": self.train, "valid": self.valid, "test": self.test}
        there = {name: dataset for name, dataset in roles.items() if dataset is not None}
        return there | {f"{SET}{name}": dataset for name, dataset in self.valid_sets.items()}

    def digest(self, arrays: bool = False) -> str:
        """Hash of the order of all samples, for ranks to compare. With `arrays` of the index arrays themselves, which
        are read for it; else of what they are made from (sizes, ranges, seeds, weights)."""
        roles = self.plan.state()["roles"]
        for role in roles.values():
            for source in role["sources"]:
                del source["prefix"]  # the data may lie elsewhere on another node
        found = {name: dataset.digest() for name, dataset in self.by_role().items()} if arrays else {}
        return content_key({"roles": roles, "arrays": found})


@dataclass(frozen=True)
class DataPlan:
    """What a run will read.

    Attributes:
        seq_length: inputs per sample.
        batch: samples per step.
        roles: train, valid, test, and `valid/<name>` for each of `sets`. What has no data or samples is absent.
        sets: the validation sets with names.
        begun: the run's first step, and the samples consumed before it (`Progress`).
        caches: keep the index arrays.
    """

    seq_length: int
    batch: int
    roles: Mapping[str, RolePlan]
    sets: tuple[SetPlan, ...] = ()
    begun: tuple[int, int] = (0, 0)
    caches: IndexCaches = field(default_factory=IndexCaches, compare=False)

    def table(self) -> list[SourceRow]:
        """One row per role and source."""
        rows = []
        for name, role in self.roles.items():
            for planned, drawn in zip(role.sources, role.draws(), strict=True):
                source = planned.source
                rows.append(
                    SourceRow(
                        role=name,
                        name=source.name,
                        prefix=source.data.prefix,
                        documents=source.num_documents,
                        tokens=source.tokens,
                        weight=drawn.weight,
                        weights=drawn.weights,
                        steps=tuple(phase.step for phase in role.reached),
                        samples=drawn.samples,
                        epochs=drawn.epochs,
                        unreached=tuple(phase.step for phase in role.phases if phase.first >= role.samples),
                    )
                )
        return rows

    def notes(self) -> list[str]:
        """What to know about documents that are left out, cut or padded, one line each."""
        planned = [(name, role.sources[d]) for name, role in self.roles.items() for d in role.drawn]
        return [
            f"{source.source.data.prefix} ({name}): {note}"
            for name, source in planned
            for note in source.packing.notes()
        ]

    def state(self) -> dict[str, Any]:
        """JSON-able record of the sample order, for checkpoints."""
        return write_state({name: role.record() for name, role in self.roles.items()}, self.begun)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse data that another tokenizer made; see `manifest.check_tokenizer`."""
        once = Once(get_logger(__name__))
        planned = [source.source.data for role in self.roles.values() for source in role.sources]
        for data in {data.prefix: data for data in planned}.values():
            check_tokenizer(data, tokenizer, once)

    def build(self, *, mmap_warmup: bool = False) -> Datasets:
        """Make or find the index arrays. Any number of processes may call this at the same time.

        Args:
            mmap_warmup: read the token files once now.
        """
        built = {name: self._build(role, mmap_warmup) for name, role in self.roles.items()}
        sets = {
            one.name: Padded(built.pop(f"{SET}{one.name}"), one.samples, one.steps * self.batch) for one in self.sets
        }
        return Datasets(self, **built, valid_sets=sets)

    def _build(self, role: RolePlan, mmap_warmup: bool) -> SampleSource:
        drawn = role.drawn
        if mmap_warmup:
            for d in drawn:
                role.sources[d].source.data.warm_up()
        datasets = [_packed(role.sources[d], self.caches) for d in drawn]
        if len(datasets) == 1:
            return datasets[0]
        return Mixture(
            datasets,
            [phase.only(drawn) for phase in role.reached],
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
    frozen: Mapping[str, Any] | None = None,
) -> DataPlan:
    """Open, divide and count the data of a run.

    Args:
        data: the data keys.
        seq_length: tokens per sample.
        seed: of the shuffles. What is frozen keeps the seed it had.
        train_samples, valid_samples, test_samples: over the whole run, from its first step on.
        set_samples: of each validation set with a name, in every evaluation; 0 leaves them out.
        progress: samples per step and what the run has done; by default a step of one sample at the beginning.
        frozen: `DataPlan.state()` of the checkpoint that is continued.

    Raises `UserError`: files missing or damaged, too few tokens, weights that do not fit, caps that do not let the data
    last, data or weights that changed where the run has been.
    """
    caches, progress = IndexCaches(data.data_cache_path, data.use_shared_fs), progress or Progress()
    wanted = dict(zip(NAMES, (train_samples, valid_samples, test_samples), strict=True))
    names = [name for name in NAMES if wanted[name] > 0 or (name == "valid" and set_samples > 0)]
    found = find_sources(data, names, seq_length, caches)
    planner = RolePlanner(data, seq_length, seed, progress, read_state(frozen), caches)
    roles: dict[str, RolePlan] = {}
    for name, sources in found.roles.items():
        if sources.sources and wanted[name] > 0:
            plan = planner.training if name == "train" else planner.other
            roles[name] = plan(name, sources, wanted[name])
    sets = []
    for one in found.valid_sets if set_samples > 0 else ():
        role = planner.once(f"{SET}{one.source.name}", one.source, set_samples)
        roles[f"{SET}{one.source.name}"] = role
        sets.append(SetPlan(one.source.name, one.tags, role.samples, -(-role.samples // progress.batch)))
    return DataPlan(seq_length, progress.batch, roles, tuple(sets), progress.begun, caches)


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


def _packed(planned: SourcePlan, caches: IndexCaches) -> PackedSource:
    prefix = planned.source.data.prefix
    return planned.packing.dataset(planned.segments, caches.of(prefix), Path(prefix).name)
