"""From the data keys of a config to the datasets of a run.

`plan_datasets` opens the files, divides them and counts: cheap, without torch, enough for a dry run and for the table
at start. `DataPlan.build` then makes the index arrays, or finds them in the cache.

The plan's `state()` belongs into every checkpoint and comes back as `frozen`: it keeps the order of a run's samples
when the run is made longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.cache import IndexCaches, content_key
from megatron.data.manifest import check_tokenizer
from megatron.data.mixture import Mixture, SampleSource, samples_to_ask
from megatron.data.packing import PackedSource, Packing, Segment
from megatron.data.packings import PACKINGS
from megatron.data.sources import Source, find_sources
from megatron.data.splits import NAMES
from megatron.errors import UserError
from megatron.log import Once, get_logger
from megatron.neox_arguments.schema_data import DataConfig
from megatron.tokenizer.base import Tokenizer

STATE_VERSION = 1


@dataclass(frozen=True)
class SourcePlan:
    """A source, the way it is packed and the segments of its sample order."""

    source: Source
    packing: Packing
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class RolePlan:
    """The sources of one role (train, valid or test) and how many samples the run wants from them together."""

    samples: int
    sources: tuple[SourcePlan, ...]


@dataclass(frozen=True)
class SourceRow:
    """A line of the table at start. `samples` is what the run draws, `epochs` how often that reads the source."""

    role: str
    prefix: str
    documents: int
    tokens: int
    weight: float
    samples: int
    epochs: float


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for a role without data or samples."""

    plan: DataPlan
    train: SampleSource | None = None
    valid: SampleSource | None = None
    test: SampleSource | None = None

    def digest(self, arrays: bool = False) -> str:
        """Hash of the order of all samples, for ranks to compare. With `arrays` of the index arrays themselves, which
        are read for it; else of what they are made from (sizes, ranges, seeds, weights)."""
        roles = self.plan.state()["roles"]
        for sources in roles.values():
            for source in sources:
                del source["prefix"]  # the data may lie elsewhere on another node
        built = {"train": self.train, "valid": self.valid, "test": self.test}
        found = {name: dataset.digest() for name, dataset in built.items() if arrays and dataset is not None}
        return content_key({"roles": roles, "arrays": found})


@dataclass(frozen=True)
class DataPlan:
    """What a run will read. A role without data or samples is absent from `roles`; `caches` keep its index arrays."""

    seq_length: int
    roles: Mapping[str, RolePlan]
    caches: IndexCaches = field(default_factory=IndexCaches, compare=False)

    def table(self) -> list[SourceRow]:
        """One row per role and source."""
        rows = []
        for name, role in self.roles.items():
            for planned in role.sources:
                source = planned.source
                samples, tokens = round(role.samples * source.weight), source.tokens
                epochs = planned.packing.epochs(samples) if samples else 0.0
                row = (source.data.prefix, source.num_documents, tokens, source.weight, samples, epochs)
                rows.append(SourceRow(name, *row))
        return rows

    def notes(self) -> list[str]:
        """What to know about documents that are left out, cut or padded, one line each."""
        planned = [(name, source) for name, role in self.roles.items() for source in role.sources]
        return [
            f"{source.source.data.prefix} ({name}): {note}"
            for name, source in planned
            if source.source.weight > 0
            for note in source.packing.notes()
        ]

    def state(self) -> dict[str, Any]:
        """JSON-able record of the sample order, for checkpoints."""

        def record(planned: SourcePlan) -> dict[str, Any]:
            source = planned.source
            segments = [asdict(segment) for segment in planned.segments]
            return {
                "prefix": source.data.prefix,
                "key": planned.packing.key,
                "weight": source.weight,
                "segments": segments,
            }

        roles = {name: [record(planned) for planned in role.sources] for name, role in self.roles.items()}
        return {"version": STATE_VERSION, "roles": roles}

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse data that another tokenizer made; see `manifest.check_tokenizer`."""
        once = Once(get_logger(__name__))
        planned = [part for role in self.roles.values() for source in role.sources for part in source.source.data.parts]
        for data in {data.prefix: data for data in planned}.values():
            check_tokenizer(data, tokenizer, once)

    def build(self, *, mmap_warmup: bool = False) -> Datasets:
        """Make or find the index arrays. Any number of processes may call this at the same time.

        Args:
            mmap_warmup: read the token files once now.
        """
        built: dict[str, SampleSource] = {}
        for name, role in self.roles.items():
            drawn = [planned for planned in role.sources if planned.source.weight > 0]
            datasets = []
            for planned in drawn:
                if mmap_warmup:
                    planned.source.data.warm_up()
                datasets.append(_packed(planned, self.caches))
            if len(datasets) == 1:
                built[name] = datasets[0]
                continue
            cache = self.caches.of(drawn[0].source.data.prefix)
            weights = [planned.source.weight for planned in drawn]
            built[name] = Mixture(datasets, weights, role.samples, cache)
        return Datasets(self, **built)


def plan_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    train_samples: int,
    valid_samples: int = 0,
    test_samples: int = 0,
    frozen: Mapping[str, Any] | None = None,
) -> DataPlan:
    """Open, divide and count the data of a run.

    Args:
        data: the data keys.
        seq_length: tokens per sample.
        seed: of the shuffles. What is frozen keeps the seed it had.
        train_samples, valid_samples, test_samples: over the whole run, from its first step on.
        frozen: `DataPlan.state()` of the checkpoint that is continued.

    Raises `UserError`: files missing or damaged, too few tokens, weights that do not fit, data that changed since the
    checkpoint.
    """
    wanted = dict(zip(NAMES, (train_samples, valid_samples, test_samples), strict=True))
    roles, caches = {}, IndexCaches(data.data_cache_path, data.use_shared_fs)
    for name, sources in find_sources(data, [name for name in NAMES if wanted[name] > 0], caches).items():
        packings = [packing_of(data, source, seq_length, caches) for source in sources]
        kept = _frozen_segments(name, sources, [packing.key for packing in packings], frozen)
        planned = []
        for source, packing, segments in zip(sources, packings, kept, strict=True):
            # NeoX asks a source of a list for half a percent more, also when it is the only one.
            asked = wanted[name] if data.data_path is not None else samples_to_ask(wanted[name], source.weight)
            what = f"{source.data.prefix} ({name}, {source.num_documents} documents)"
            if source.weight > 0:
                segments = packing.plan(asked, seed, segments, what)
            planned.append(SourcePlan(source, packing, segments))
        if planned:
            roles[name] = RolePlan(wanted[name], tuple(planned))
    return DataPlan(seq_length, roles, caches)


def build_datasets(data: DataConfig, **counts: Any) -> Datasets:
    """`plan_datasets` with the same arguments, then `DataPlan.build` with what the data keys say about it."""
    plan = plan_datasets(data, **counts)
    return plan.build(mmap_warmup=data.mmap_warmup)


def epoch_samples(data: DataConfig, seq_length: int, epochs: int = 1) -> int:
    """Training samples in `epochs` passes over all training data: what `train_epochs` is counted in."""
    caches = IndexCaches(data.data_cache_path, data.use_shared_fs)
    sources = find_sources(data, ["train"], caches)["train"]
    return sum(packing_of(data, source, seq_length, caches).samples_per_epoch(epochs) for source in sources)


def packing_of(data: DataConfig, source: Source, seq_length: int, caches: IndexCaches) -> Packing:
    """The packing that a config asks for, bound to the documents of a source."""
    return PACKINGS[data.pack_impl](
        source.data,
        seq_length=seq_length,
        documents=source.documents,
        labels=source.labels,
        allow_chopped=data.allow_chopped,
        cache=caches.of(source.data.prefix),
    )


def _packed(planned: SourcePlan, caches: IndexCaches) -> PackedSource:
    prefix = planned.source.data.prefix
    return planned.packing.dataset(planned.segments, caches.of(prefix), Path(prefix).name)


def _frozen_segments(
    name: str, sources: Sequence[Source], keys: Sequence[str], frozen: Mapping[str, Any] | None
) -> list[tuple[Segment, ...]]:
    """The segments each source had in the checkpoint, none for a fresh start. Refuses data that changed since."""
    saved = (frozen or {}).get("roles", {}).get(name)
    if saved is None:
        return [()] * len(sources)
    if frozen["version"] != STATE_VERSION:
        raise UserError(f"the checkpoint's data state has version {frozen['version']}, expected {STATE_VERSION}.")
    remedy = "Continue with the data of the checkpoint, or begin a new order of the data with finetune: true."
    if len(saved) != len(sources):
        raise UserError(f"the {name} data had {len(saved)} sources in the checkpoint, now {len(sources)}. {remedy}")
    for source, key, old in zip(sources, keys, saved, strict=True):
        where = f"{source.data.prefix} ({name})"
        if old["key"] != key:
            raise UserError(
                f"{where}: documents, their range, their labels, pack_impl or seq_length changed since the checkpoint "
                f"(it was {old['prefix']}), so its samples would come in another order. {remedy}"
            )
        if abs(old["weight"] - source.weight) > 1e-12:
            raise UserError(f"{where}: weight {old['weight']:.6g} in the checkpoint, {source.weight:.6g} now. {remedy}")
    return [tuple(Segment(**segment) for segment in old["segments"]) for old in saved]
