"""How the samples of one role come about: which sources, in which order of their own, drawn in which proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.data.order.caps import Caps
from megatron.data.order.frozen import FrozenRole, FrozenSource, check_past, check_sources, same_data
from megatron.data.order.mixture import samples_to_ask
from megatron.data.order.phases import Phase, Progress, Weights, alike, begin, go_on, lengths, shares, since
from megatron.data.order.sources import RoleSources, Source
from megatron.data.packing.contract import Packing, Segment
from megatron.data.packing.packings import PACKINGS
from megatron.data.tokens.cache import IndexCaches
from megatron.log import get_logger
from megatron.neox_arguments.schema_data import DataConfig

LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class SourcePlan:
    """A source, how it is packed, and the segments of its sample order.

    Attributes:
        key: hash of what that order depends on besides the segments.
        most: samples that the run may draw; None: any number.
    """

    source: Source
    packing: Packing
    key: str
    segments: tuple[Segment, ...] = ()
    most: int | None = None

    def record(self) -> FrozenSource:
        source = self.source
        labels = source.labels is not None
        return FrozenSource(source.name, source.data.prefix, self.key, self.segments, labels, self.most)


@dataclass(frozen=True)
class Drawn:
    """What a run takes of a source: samples and epochs, as the weights have it; its weight over all, and by phase."""

    samples: int
    epochs: float
    weight: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class RolePlan:
    """The sources of one role, how many samples the run wants from them together, and in which proportions."""

    samples: int
    sources: tuple[SourcePlan, ...]
    phases: tuple[Phase, ...]

    @property
    def reached(self) -> list[Phase]:
        """The phases that the run draws from."""
        counts = lengths(self.phases, self.samples)
        return [phase for phase, count in zip(self.phases, counts, strict=True) if count]

    @property
    def drawn(self) -> list[int]:
        """The sources that are drawn from at some time."""
        return [d for d, share in enumerate(shares(self.phases, self.samples)) if share > 0]

    def draws(self) -> list[Drawn]:
        """What the run takes of each source."""
        reached, found = self.reached, []
        for d, (one, share) in enumerate(zip(self.sources, shares(self.phases, self.samples), strict=True)):
            weights = tuple(phase.weights[d] for phase in reached)
            samples = round(share)
            epochs = one.packing.epochs(samples) if samples else 0.0
            found.append(Drawn(samples, epochs, weights[0] if len(weights) == 1 else share / self.samples, weights))
        return found

    def record(self) -> FrozenRole:
        return FrozenRole(self.samples, tuple(planned.record() for planned in self.sources), self.phases)


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


@dataclass(frozen=True)
class RolePlanner:
    """Makes the plans of a run's roles. `seed` is of the shuffles: what is frozen keeps the seed it had."""

    data: DataConfig
    seq_length: int
    seed: int
    progress: Progress
    frozen: Mapping[str, FrozenRole]
    caches: IndexCaches

    def training(self, name: str, found: RoleSources, samples: int) -> RolePlan:
        """`samples` from the sources of training. What the checkpoint has read stays as it was, or `UserError`."""
        planned, saved = self._bound(found.sources), self.frozen.get(name)
        asked = since(found.weights, self.progress.begun[0])
        kept: list[tuple[Segment, ...]] = [()] * len(planned)
        if saved is None:
            phases = begin(asked, self.progress)
        else:
            planned, wanted, saved = self._continued(planned, asked, saved)
            phases = go_on(saved.phases, wanted, self.progress)
            kept = [source.segments for source in saved.sources]
        if saved is not None and _unchanged(saved, planned, phases, samples):
            phases = saved.phases
        else:
            phases = self._caps(planned).fit(phases, samples, self.progress)
        return self._planned(name, RolePlan(samples, tuple(planned), phases), kept)

    def other(self, name: str, found: RoleSources, samples: int) -> RolePlan:
        """`samples` of validation or test data, which may change: what is as it was keeps its order."""
        planned = self._bound(found.sources)
        kept: list[tuple[Segment, ...]] = [()] * len(planned)
        saved = self.frozen.get(name)
        if saved is not None:
            now = [one.record() for one in planned]
            places = same_data(saved.sources, now)
            for old, place in zip(saved.sources, places, strict=True):
                if place is not None:
                    kept[place] = old.segments
            if None in places or len(places) != len(planned):
                LOGGER.info(f"the {name} data is not what it was when the checkpoint was made")
        return self._planned(name, RolePlan(samples, tuple(planned), begin(found.weights, Progress())), kept)

    def once(self, name: str, source: Source, samples: int) -> RolePlan:
        """At most `samples` samples of a source, no document twice.

        pack_until_overflow does not know where its passes end, so it gives way to best_fit, which puts whole documents
        together as well.
        """
        walks_on = self.data.pack_impl == "pack_until_overflow"
        planner = replace(self, data=replace(self.data, pack_impl="best_fit")) if walks_on else self
        planned = planner._bound([source])
        there = planned[0].packing.samples_per_epoch()
        role = RolePlan(max(1, min(samples, there)), tuple(planned), (Phase.constant([1.0]),))
        return self._planned(name, role, [()], exact=True)

    def _bound(self, sources: Sequence[Source]) -> list[SourcePlan]:
        bound = []
        for source in sources:
            packing = packing_of(self.data, source, self.seq_length, self.caches)
            cap = source.max_epochs
            most = None if cap is None else math.floor(cap * packing.samples_per_epoch() + 1e-9)
            bound.append(SourcePlan(source, packing, packing.key, most=most))
        return bound

    def _caps(self, planned: Sequence[SourcePlan]) -> Caps:
        capped = [one.most is not None for one in planned]
        return Caps(
            names=[one.source.name for one in planned],
            epoch=[one.packing.samples_per_epoch() if has else 0 for one, has in zip(planned, capped, strict=True)],
            most=[one.most for one in planned],
            redistribute=self.data.train_data_on_cap == "redistribute",
        )

    def _continued(
        self, planned: list[SourcePlan], wanted: Sequence[tuple[int, Weights]], saved: FrozenRole
    ) -> tuple[list[SourcePlan], list[tuple[int, Weights]], FrozenRole]:
        """Both sides in one order of sources: those of the checkpoint first, as they were drawn, then the new ones."""
        now = [one.record() for one in planned]
        places = check_sources(saved, now, self.progress)
        origin = {place: d for d, place in enumerate(places) if place is not None}  # where a source of now was then

        def then(order: Sequence[int]) -> FrozenRole:
            sources = tuple(saved.sources[origin[i]] if i in origin else now[i] for i in order)
            phases = tuple(
                replace(
                    phase,
                    weights=tuple(phase.weights[origin[i]] if i in origin else 0.0 for i in order),
                    asked=tuple(phase.asked[origin[i]] if i in origin else 0.0 for i in order),
                )
                for phase in saved.phases
            )
            return FrozenRole(saved.samples, sources, phases)

        names = [one.source.name for one in planned]
        check_past(then(range(len(planned))), wanted, names, self.progress, self.data.mixture is not None)
        order = [*origin, *(i for i in range(len(planned)) if i not in origin)]
        for i in order[len(origin) :]:
            LOGGER.info(f"{names[i]} is new: it was not among the training data of the checkpoint")
        reordered = [(step, tuple(weights[i] for i in order)) for step, weights in wanted]
        return [planned[i] for i in order], reordered, then(order)

    def _planned(self, name: str, role: RolePlan, kept: Sequence[tuple[Segment, ...]], exact: bool = False) -> RolePlan:
        """The plan with the segments that its samples take: those `kept`, and what is missing."""
        exact = exact or self.data.data_path is not None
        counts, drawn = lengths(role.phases, role.samples), role.drawn
        sources = []
        for d, (one, segments) in enumerate(zip(role.sources, kept, strict=True)):
            # NeoX asks a source of a list for half a percent more, also when it is the only one.
            margin = (samples_to_ask(n, phase.weights[d]) for n, phase in zip(counts, role.phases, strict=True))
            asked = role.samples if exact else sum(margin)
            what = f"{one.source.data.prefix} ({name}, {one.source.num_documents} documents)"
            if d in drawn:
                segments = _segments(one, asked, self.seed, segments, what)
            sources.append(replace(one, segments=tuple(segments)))
        return replace(role, sources=tuple(sources))


def _segments(one: SourcePlan, asked: int, seed: int, kept: tuple[Segment, ...], what: str) -> tuple[Segment, ...]:
    """The order of a source. With a cap on its epochs it is read epoch by epoch, each shuffled for itself."""
    if one.most is None:
        return one.packing.plan(asked, seed, kept, what)
    asked, epoch = min(asked, one.most), one.packing.samples_per_epoch()
    segments = one.packing.plan(epoch, seed, kept, what)
    while (there := sum(segment.samples for segment in segments)) < asked:
        segments = one.packing.plan(there + epoch, seed, segments, what)
    return segments


def _unchanged(saved: FrozenRole, planned: Sequence[SourcePlan], phases: Sequence[Phase], samples: int) -> bool:
    """Whether the run is planned as it was, so that what was decided then about caps holds."""

    def borders(of: Sequence[Phase]) -> list[Phase]:
        return [phase for i, phase in enumerate(of) if i == 0 or not alike(phase.asked, of[i - 1].asked)]

    was, now = borders(saved.phases), borders(phases)
    return (
        saved.samples == samples
        and [source.most for source in saved.sources] == [one.most for one in planned]
        and len(was) == len(now)
        and all(a.first == b.first and alike(a.asked, b.asked) for a, b in zip(was, now, strict=True))
    )
