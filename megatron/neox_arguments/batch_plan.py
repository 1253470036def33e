"""How many samples each step of a run takes, in rows of which length, and how far that gets: steps, samples and tokens
into each other.

Everything is a pure function of the step, so that a resumed run needs no replay. A sample is `seq_length` tokens, a
pair in two rows twice as many, also where it is cut into shorter rows.
Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from megatron.neox_arguments.forget_steps import SOURCES, TRAIN, ForgetSteps
from megatron.rows import row

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

LR_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""`batch_size_lr_scale`."""


def rows_per_sample(value: Callable[[str], Any]) -> int:
    """How many rows of a batch a sample is, by flat keys: 2 where each text of a pair has one of its own."""
    pairs = value("dataset_impl") == "pairwise"
    return 2 if pairs and row("pack_impl", value("pack_impl")).get("answers") == "apart" else 1


@dataclass(frozen=True)
class BatchPlan:
    """The global batch of every step, counted from the start of the run.

    Attributes:
        stages: (first step, samples per step from there on), the first at step 0, ascending.
        tokens_per_sample: inputs of a sample.
        skip: ranges [first, end) of steps whose samples are consumed without an update.
        lengths: (first step, inputs of a row from there on), as `stages`; the lengths divide `tokens_per_sample`. Empty
            where every row is a whole sample.
        lr_power: the learning rate follows the batch size to this power, and is as configured at the last size.
        forget: the steps that unlearn; None: all are ordinary ones.
        counted: the sources whose samples count; all of them, but in a plan of `only` one.
    """

    stages: tuple[tuple[int, int], ...]
    tokens_per_sample: int = 1
    skip: tuple[tuple[int, int], ...] = ()
    lr_power: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    forget: ForgetSteps | None = None
    counted: tuple[str, ...] = SOURCES

    @classmethod
    def constant(cls, batch_size: int, tokens_per_sample: int = 1) -> BatchPlan:
        """Every step takes the same number of samples."""
        return cls(((0, batch_size),), tokens_per_sample)

    @classmethod
    def of(cls, args: NeoXArgs) -> BatchPlan:
        """That of a derived configuration."""
        return cls.from_values(args.get)

    @classmethod
    def from_values(cls, value: Callable[[str], Any]) -> BatchPlan:
        """That of flat keys, whose derived values are known."""
        plan = cls(
            batch_stages(value("train_batch_size"), value("batch_size_schedule"), value("rampup_batch_size")),
            rows_per_sample(value) * value("seq_length"),
            value("skip_steps") or (),
            LR_POWERS[value("batch_size_lr_scale")],
            forget=ForgetSteps.from_values(value),
        )
        ramp = value("seq_length_ramp")
        return plan if ramp is None else replace(plan, lengths=length_stages(plan, **ramp))

    @cached_property
    def _before(self) -> list[int]:
        """Samples consumed before each stage."""
        taken = [(end - first) * batch for (first, batch), (end, _) in pairwise(self.stages)]
        return list(accumulate(taken, initial=0))

    def only(self, source: str) -> BatchPlan:
        """The same steps, of which only the samples from one source count."""
        return replace(self, counted=(source,))

    def forgets(self, step: int) -> bool:
        """Whether that step unlearns."""
        return self.forget is not None and self.forget.is_one(step)

    def sources(self, step: int) -> tuple[str, ...]:
        """The sources from which that step takes samples, a `part_size` from each, in this order."""
        return self.forget.sources if self.forget is not None and self.forget.is_one(step) else (TRAIN,)

    def part_size(self, step: int) -> int:
        """Samples over all ranks that the step which follows `step` completed ones takes from each of its sources."""
        return _held(self.stages, step)[1]

    def batch_size(self, step: int) -> int:
        """Samples over all ranks of the step that follows `step` completed ones."""
        return self.part_size(step) * sum(source in self.counted for source in self.sources(step))

    def skips(self, step: int) -> bool:
        """Whether that step updates nothing."""
        return any(first <= step < end for first, end in self.skip)

    def lr_factor(self, step: int) -> float:
        """What that step's learning rate is multiplied by."""
        of_forget = self.forget.lr_scale if self.forget is not None and self.forget.is_one(step) else 1.0
        return (self.part_size(step) / self.stages[-1][1]) ** self.lr_power * of_forget

    def seq_length(self, step: int) -> int:
        """Inputs of each row of that step."""
        return _held(self.lengths, step)[1] if self.lengths else self.tokens_per_sample

    def describe(self) -> str:
        """How the batch grows, behind a line about the last one; empty where it does not."""
        if len(self.stages) == 1:
            return ""
        shown = [f"{batch:,} from step {step:,}" for step, batch in self.stages]
        return "; samples per step: " + ", ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])

    def describe_forgetting(self, steps: int) -> list[str]:
        """Which of the run's steps unlearn, as a line; none where none do."""
        return [self.forget.describe(steps)] if self.forget is not None else []

    def metrics(self, step: int) -> dict[str, float]:
        """What is logged of that step, where it is not always the same."""
        found: dict[str, float] = {}
        if len(self.stages) > 1:
            found["train/batch_size"] = self.part_size(step)
        if self.lengths:
            found["train/seq_length"] = self.seq_length(step)
        return found

    def samples(self, step: int) -> int:
        """Samples consumed before that step."""
        taken = self._parts(step)
        if self.forget is None:
            return taken if TRAIN in self.counted else 0
        of_forget = self._forget_parts(step)
        alike = sum(source in self.counted for source in self.forget.sources)
        return (taken - of_forget if TRAIN in self.counted else 0) + of_forget * alike

    def _parts(self, step: int) -> int:
        """Samples before that step, a part of each."""
        first, batch = stage = _held(self.stages, step)
        return self._before[self.stages.index(stage)] + (step - first) * batch

    def _forget_parts(self, step: int) -> int:
        """The same of the steps that forget."""
        assert self.forget is not None
        ends = [*(first for first, _ in self.stages[1:]), step]
        before = self.forget.before
        pairs = zip(self.stages, ends, strict=True)
        return sum(max(0, before(min(end, step)) - before(first)) * batch for (first, batch), end in pairs)

    def tokens(self, step: int) -> int:
        """Tokens consumed before that step."""
        return self.samples(step) * self.tokens_per_sample

    def whole_steps(self, samples: int) -> int:
        """The most steps that take no more than `samples` samples."""
        at = max(bisect_right(self._before, samples) - 1, 0)
        first, batch = self.stages[at]
        steps = first + (samples - self._before[at]) // batch
        if self.forget is None:
            return steps
        end = max(steps, 1)
        while self.samples(end) <= samples:
            end *= 2
        return bisect_right(range(end), samples, key=self.samples) - 1

    def steps_for_tokens(self, tokens: int) -> int:
        """The fewest steps that take at least `tokens` tokens."""
        return self.whole_steps(-(-tokens // self.tokens_per_sample) - 1) + 1 if tokens > 0 else 0


def batch_stages(
    last: int, schedule: tuple[tuple[int, int], ...] | None, ramp: tuple[int, int, int] | None
) -> tuple[tuple[int, int], ...]:
    """The stages of a plan that ends with `last` samples per step: as scheduled, or by a ramp.

    A ramp is Megatron-LM's (`rampup_batch_size`): its samples in equal parts, one for each increment. The batch grows
    with the first step before which a part is consumed.
    """
    if schedule is not None:
        return schedule
    if ramp is None or ramp[0] == last:
        return ((0, last),)
    first, increment, samples = ramp
    increments = (last - first) // increment
    stages: list[tuple[int, int]] = []
    step = consumed = 0
    while consumed < samples:
        done = consumed * increments // samples
        batch = first + done * increment
        stages.append((step, batch))
        until = -(-(done + 1) * samples // increments)  # the samples with which the next part begins
        steps = -(-(until - consumed) // batch)
        step, consumed = step + steps, consumed + steps * batch
    return (*stages, (step, last))


def row_lengths(seq_length: int, start: int, multiple: int = 1) -> list[int]:
    """The lengths from `start` up that samples can be cut into without a rest; but for the last multiples of one."""
    found = [n for n in range(start, seq_length) if seq_length % n == 0 and n % multiple == 0]
    return [*found, seq_length]


def length_stages(
    plan: BatchPlan, start: int, steps: int | None = None, tokens: int | None = None, multiple: int = 1
) -> tuple[tuple[int, int], ...]:
    """The lengths of a `seq_length_ramp`: a straight line from `start` to whole samples over so many steps or tokens,
    rounded down to what samples can be cut into."""
    whole = plan.tokens_per_sample

    def reached(length: int) -> int:
        done = Fraction(length - start, max(whole - start, 1))
        return ceil(done * steps) if steps is not None else plan.steps_for_tokens(ceil(done * (tokens or 0)))

    return tuple((reached(length), length) for length in row_lengths(whole, start, multiple))


def _held(stages: Sequence[tuple[int, int]], step: int) -> tuple[int, int]:
    """The stage that a step is in."""
    return stages[max(bisect_right(stages, step, key=lambda stage: stage[0]) - 1, 0)]
