"""The order of the samples of one role: its sources, the order of each, and the weights with which they are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.data.order.caps import Caps
from megatron.data.order.mixture import samples_to_ask
from megatron.data.order.phases import (
    Phase,
    Progress,
    Weights,
    alike,
    continue_phases,
    lengths,
    make_phases,
    phases_from,
    shares,
)
from megatron.data.order.saved_order import SavedOrder, SavedRole, SavedSource, check_past, check_sources, match_sources
from megatron.data.order.sources import RoleSources, Source
from megatron.data.packing import PACKINGS, Packing, Segment, count_samples
from megatron.data.sample import SampleDataset
from megatron.data.tokens.cache import IndexCaches
from megatron.log import get_logger
from megatron.neox_arguments.schema_data import DataConfig

LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class SourceOrder:
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

    def dataset(self) -> SampleDataset:
        return self.packing.dataset(self.segments)

    def save(self) -> SavedSource:
        source = self.source
        labels = source.labels is not None
        return SavedSource(source.name, source.data.prefix, self.key, self.segments, labels, self.most, source.identity)


@dataclass(frozen=True)
class Draws:
    """What a run draws from a source: samples and epochs by weight; its weight over all, and in each phase."""

    samples: int
    epochs: float
    weight: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class RoleOrder:
    """The sources of one role, how many samples the run wants from them together, and in which proportions."""

    samples: int
    sources: tuple[SourceOrder, ...]
    phases: tuple[Phase, ...]

    @property
    def rows(self) -> int:
        """Rows of a sample: 2 where each text of a pair has its own."""
        return self.sources[0].packing.rows

    @property
    def reached(self) -> list[Phase]:
        """The phases that the run draws from."""
        counts = lengths(self.phases, self.samples)
        return [phase for phase, count in zip(self.phases, counts, strict=True) if count]

    @property
    def drawn(self) -> list[int]:
        """The sources that are drawn from at some time."""
        return [d for d, share in enumerate(shares(self.phases, self.samples)) if share > 0]

    def count_draws(self) -> list[Draws]:
        """What the run draws from each source."""
        reached, found = self.reached, []
        for d, (one, share) in enumerate(zip(self.sources, shares(self.phases, self.samples), strict=True)):
            weights = tuple(phase.weights[d] for phase in reached)
            samples = round(share)
            epochs = one.packing.epochs(samples) if samples else 0.0
            found.append(Draws(samples, epochs, weights[0] if len(weights) == 1 else share / self.samples, weights))
        return found

    def save(self) -> SavedRole:
        return SavedRole(self.samples, tuple(planned.save() for planned in self.sources), self.phases)


def packing_of(data: DataConfig, source: Source, seq_length: int, caches: IndexCaches) -> Packing:
    """The packing that a config asks for, bound to the documents of a source."""
    return PACKINGS[data.pack_impl](
        source.data,
        seq_length=seq_length,
        documents=source.documents,
        labels=source.labels,
        allow_chopped=data.allow_chopped,
        cache=caches.of(source.data.prefix),
        **{name: one for name in ("rewards", "references") if (one := getattr(source, name)) is not None},
    )


@dataclass(frozen=True)
class OrderBuilder:
    """Makes the orders of a run's roles. `seed` is of the shuffles: what is `saved` keeps the seed it had."""

    data: DataConfig
    seq_length: int
    seed: int
    progress: Progress
    saved: SavedOrder
    caches: IndexCaches

    def order_training(self, name: str, found: RoleSources, samples: int) -> RoleOrder:
        """`samples` from the sources of training. Raises `UserError` when what the run has read would change."""
        planned, saved = self._bind(found.sources), self.saved.roles.get(name)
        asked = phases_from(found.weights, self.progress.start[0])
        kept: list[tuple[Segment, ...]] = [()] * len(planned)
        if saved is None:
            phases = make_phases(asked, self.progress)
        else:
            planned, wanted, saved = self._align(planned, asked, saved)
            phases = continue_phases(saved.phases, wanted, self.progress)
            kept = [source.segments for source in saved.sources]
        if saved is not None and _is_unchanged(saved, planned, phases, samples):
            phases = saved.phases
        else:
            phases = self._caps(planned).fit(phases, samples, self.progress)
        return self._add_segments(name, RoleOrder(samples, tuple(planned), phases), kept)

    def order_other(self, name: str, found: RoleSources, samples: int) -> RoleOrder:
        """`samples` of validation or test data, which may change: unchanged sources keep their order."""
        planned = self._bind(found.sources)
        kept: list[tuple[Segment, ...]] = [()] * len(planned)
        saved = self.saved.roles.get(name)
        if saved is not None:
            now = [one.save() for one in planned]
            places = match_sources(saved.sources, now)
            for old, place in zip(saved.sources, places, strict=True):
                if place is not None:
                    kept[place] = old.segments
            if None in places or len(places) != len(planned):
                LOGGER.info(f"the {name} data differs from that of the checkpoint")
        return self._add_segments(
            name, RoleOrder(samples, tuple(planned), make_phases(found.weights, Progress())), kept
        )

    def order_once(self, name: str, source: Source, samples: int) -> RoleOrder:
        """At most `samples` samples of a source, no document twice.

        With pack_until_overflow, whose passes have no known end, best_fit is used: it also keeps documents whole.
        """
        endless = self.data.pack_impl == "pack_until_overflow"
        builder = replace(self, data=replace(self.data, pack_impl="best_fit")) if endless else self
        planned = builder._bind([source])
        there = planned[0].packing.samples_per_epoch()
        role = RoleOrder(max(1, min(samples, there)), tuple(planned), (Phase.constant([1.0]),))
        return self._add_segments(name, role, [()], exact=True)

    def _bind(self, sources: Sequence[Source]) -> list[SourceOrder]:
        bound = []
        for source in sources:
            packing = packing_of(self.data, source, self.seq_length, self.caches)
            cap = source.max_epochs
            most = None if cap is None else math.floor(cap * packing.samples_per_epoch() + 1e-9)
            bound.append(SourceOrder(source, packing, packing.key, most=most))
        return bound

    def _caps(self, planned: Sequence[SourceOrder]) -> Caps:
        capped = [one.most is not None for one in planned]
        return Caps(
            names=[one.source.name for one in planned],
            epoch=[one.packing.samples_per_epoch() if has else 0 for one, has in zip(planned, capped, strict=True)],
            most=[one.most for one in planned],
            redistribute=self.data.train_data_on_cap == "redistribute",
        )

    def _align(
        self, planned: list[SourceOrder], wanted: Sequence[tuple[int, Weights]], saved: SavedRole
    ) -> tuple[list[SourceOrder], list[tuple[int, Weights]], SavedRole]:
        """Both sides in one order of sources: those of the checkpoint first, then the new ones."""
        now = [one.save() for one in planned]
        places = check_sources(saved, now, self.progress, self.saved.remedy)
        origin = {
            place: d for d, place in enumerate(places) if place is not None
        }  # present place -> place in the checkpoint

        def then(order: Sequence[int]) -> SavedRole:
            sources = tuple(saved.sources[origin[i]] if i in origin else now[i] for i in order)
            phases = tuple(
                replace(
                    phase,
                    weights=tuple(phase.weights[origin[i]] if i in origin else 0.0 for i in order),
                    asked=tuple(phase.asked[origin[i]] if i in origin else 0.0 for i in order),
                )
                for phase in saved.phases
            )
            return SavedRole(saved.samples, sources, phases)

        names = [one.source.name for one in planned]
        check_past(
            then(range(len(planned))), wanted, names, self.progress, self.data.mixture is not None, self.saved.remedy
        )
        order = [*origin, *(i for i in range(len(planned)) if i not in origin)]
        for i in order[len(origin) :]:
            LOGGER.info(f"{names[i]} is a new source: it is not in the training data of the checkpoint")
        reordered = [(step, tuple(weights[i] for i in order)) for step, weights in wanted]
        return [planned[i] for i in order], reordered, then(order)

    def _add_segments(
        self, name: str, role: RoleOrder, kept: Sequence[tuple[Segment, ...]], exact: bool = False
    ) -> RoleOrder:
        """The role with the segments that its samples need: the `kept` ones and, if they are too few, a new one."""
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


def _segments(one: SourceOrder, asked: int, seed: int, kept: tuple[Segment, ...], what: str) -> tuple[Segment, ...]:
    """The segments of a source. With a cap on its epochs there is one per epoch, each shuffled by itself."""
    if one.most is None:
        return one.packing.segments(asked, seed, kept, what)
    asked, epoch = min(asked, one.most), one.packing.samples_per_epoch()
    segments = one.packing.segments(epoch, seed, kept, what)
    while (there := count_samples(segments)) < asked:
        segments = one.packing.segments(there + epoch, seed, segments, what)
    return segments


def _is_unchanged(saved: SavedRole, planned: Sequence[SourceOrder], phases: Sequence[Phase], samples: int) -> bool:
    """Whether the run is planned as before, so that the decisions about caps still hold."""

    def borders(of: Sequence[Phase]) -> list[Phase]:
        return [phase for i, phase in enumerate(of) if i == 0 or not alike(phase.asked, of[i - 1].asked)]

    was, now = borders(saved.phases), borders(phases)
    return (
        saved.samples == samples
        and [source.most for source in saved.sources] == [one.most for one in planned]
        and len(was) == len(now)
        and all(a.first == b.first and alike(a.asked, b.asked) for a, b in zip(was, now, strict=True))
    )
