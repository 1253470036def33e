"""Training data of a run that unlearns: each step takes its samples from the sources that its plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron.data.order.phases import Progress
from megatron.data.reference import REFERENCE
from megatron.data.sample import NO_SAMPLES, Provenance, Sample, SampleDataset, Wanted
from megatron.data.tokens.cache import content_key
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.forget_steps import FORGET, SOURCES

KIND = "kind"
"""The extra of each token that says where it is from: its source's place in `SOURCES`, as float32."""


@dataclass(frozen=True)
class SourceCounts:
    """What a run takes from each source, at any step, counted on from what its checkpoint had taken.

    Attributes:
        plan: of the run.
        step: where `taken` holds.
        taken: samples that each source had given before that step.
        end: steps of the whole run.
    """

    plan: BatchPlan
    step: int
    taken: Mapping[str, int]
    end: int

    def before(self, step: int, source: str) -> int:
        """Samples that a source gave before that step."""
        plan = self.plan.only(source)
        return self.taken.get(source, 0) + plan.samples(step) - plan.samples(self.step)

    def at(self, step: int) -> dict[str, int]:
        """The same of every source that gave some."""
        counts = {source: self.before(step, source) for source in SOURCES}
        return {source: count for source, count in counts.items() if count}

    def progress(self, source: str, whole: Progress) -> Progress:
        """How far the order of one source is, where that of the run is `whole`."""
        first, steps = whole.start[0], whole.steps
        start = (first, max(0, self.before(first, source)))  # a source that came later had given none
        return Progress(whole.batch, steps, self.before(steps, source), start, self.plan.only(source))

    def total(self, step: int) -> int:
        """Samples of all sources before that step: how the samples of training are numbered."""
        return sum(self.taken.values()) + self.plan.samples(step) - self.plan.samples(self.step)

    def step_of(self, index: int) -> int:
        """The step that takes sample `index` of training."""
        return self.plan.whole_steps(index - self.total(0))

    def draw(self, index: int) -> tuple[str, int]:
        """The source of sample `index` of training, and its number in that source."""
        step = self.step_of(index)
        part, inside = divmod(index - self.total(step), self.plan.part_size(step))
        source = self.plan.sources(step)[part]
        return source, self.before(step, source) + inside

    def index_of(self, source: str, number: int) -> int:
        """The inverse of `draw`."""
        step = self.plan.only(source).whole_steps(number - self.before(0, source))
        part = self.plan.sources(step).index(source)
        return self.total(step) + part * self.plan.part_size(step) + number - self.before(step, source)


class ByStep:
    """The samples of training in the order in which steps take them: first those of a step's first source.

    Args:
        sources: by role; each is read in its own order, and none again before it is used up.
    """

    def __init__(self, counts: SourceCounts, sources: Mapping[str, SampleDataset]) -> None:
        self.counts, self.sources = counts, sources
        self.samples = counts.total(counts.end)

    def _draw(self, index: int) -> tuple[str, int]:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return self.counts.draw(index)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        source, number = self._draw(index)
        sample = self.sources[source][number]
        assert isinstance(sample, Sample), "rules_unlearning"
        extras = {KIND: np.full(len(sample.tokens), SOURCES.index(source), np.float32)}
        if source != FORGET:
            extras[REFERENCE] = np.zeros_like(extras[KIND])  # only what is forgotten is compared with another model
        answers = documents_of(sample) if source == FORGET and sample.answers is None else sample.answers
        return replace(sample, answers=answers, extras={**sample.extras, **extras})

    def locate(self, index: int) -> Provenance:
        source, number = self._draw(index)
        return self.sources[source].locate(number).within(source)

    def may_hold(self, wanted: Wanted) -> np.ndarray:
        found = [NO_SAMPLES]
        for source, data in self.sources.items():
            given = data.may_hold(wanted)
            given = given[given < self.counts.before(self.counts.end, source)]
            found.append(np.array([self.counts.index_of(source, int(number)) for number in given], dtype=np.int64))
        return np.sort(np.concatenate(found))

    def digest(self) -> str:
        digests = {source: data.digest() for source, data in self.sources.items()}
        return content_key({"sources": digests, "taken": dict(self.counts.taken), "step": self.counts.step})


def documents_of(sample: Sample) -> np.ndarray | None:
    """The documents of a sample as answers; None when it does not know them, or is one."""
    if sample.starts is None or len(sample.starts) < 2:
        return None
    begins = np.zeros(len(sample.tokens), np.int64)
    begins[sample.starts[(sample.starts > 1) & (sample.starts < len(begins))]] = 1
    return np.cumsum(begins)
