"""Rules about batches and lengths that change while a run goes on, and about steps that are left out."""

from __future__ import annotations

from math import ceil

from megatron.neox_arguments import batch_plan
from megatron.neox_arguments.draft import Draft, nearest_multiples
from megatron.neox_arguments.lengths import Length, parse_count

SCHEDULE, RAMP, LENGTHS = "batch_size_schedule", "rampup_batch_size", "seq_length_ramp"
_TOTAL, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


def stages_in_steps(draft: Draft) -> None:
    """`batch_size_schedule`: where its stages begin, in steps."""
    if draft[SCHEDULE] is None:
        return
    stages: list[tuple[int, int]] = []
    for begin, batch in draft[SCHEDULE]:
        if batch < 1:
            draft.fail(SCHEDULE, "batch sizes must be above 0")
        stages.append((_step(draft, begin, stages), batch))
    steps = [step for step, _ in stages]
    if not steps or steps[0] != 0 or steps != sorted(set(steps)):
        draft.fail(SCHEDULE, f"is [[0, batch], [begin, batch], ...] with rising begins, the first 0, not steps {steps}")
    draft.imply(SCHEDULE, tuple(stages), SCHEDULE)


def _step(draft: Draft, begin: float | str, before: list[tuple[int, int]]) -> int:
    """The first step of a stage: a whole number is one, a text names steps or tokens, a fraction is one of the run."""
    if isinstance(begin, int) or begin == 0:
        return int(begin)
    try:
        found = Length.parse(begin)
        tokens = found.number
        if found.unit == "steps":
            return int(found.number)
        if found.unit == "share" and draft["train_iters"] is not None:
            return ceil(found.number * draft["train_iters"])
        if found.unit == "share" and draft["train_tokens"] is not None:
            tokens *= parse_count(draft["train_tokens"], "token")
        elif found.unit == "share":
            draft.fail(SCHEDULE, f"{begin} of the run needs train_iters or train_tokens; write steps or '2B tokens'")
    except ValueError as problem:
        draft.fail(SCHEDULE, str(problem))
    if not before:
        draft.fail(SCHEDULE, f"the first batch begins at 0, not {begin}")
    return batch_plan.BatchPlan(tuple(before), draft["seq_length"]).steps_for_tokens(ceil(tokens))


def last_batch(draft: Draft) -> int | None:
    """The batch size that `batch_size_schedule` ends with, which is `train_batch_size`; None without a schedule."""
    if draft[SCHEDULE] is None:
        return None
    last = draft[SCHEDULE][-1][1]
    if draft.get_given(_TOTAL) not in (None, last):
        draft.fail(SCHEDULE, f"ends with {last}, but {_TOTAL} is {draft[_TOTAL]} ({draft.source(_TOTAL)})")
    return last


def batch_sizes(draft: Draft) -> None:
    """Every batch size is reached by whole micro-batches of all data-parallel ranks, and the ramp by whole steps of its
    size."""
    if draft[RAMP] is not None and draft[SCHEDULE] is not None:
        draft.fail(RAMP, f"{SCHEDULE} is set too ({draft.source(SCHEDULE)}); keep one of the two")
    unit = draft[_MICRO] * draft["data_parallel_size"]
    product = f"micro {draft[_MICRO]} x dp {draft['data_parallel_size']} = {unit}"
    for step, batch in draft[SCHEDULE] or ():
        if batch % unit:
            near = nearest_multiples(batch, unit)
            draft.fail(SCHEDULE, f"{batch} (from step {step}) is not a multiple of {product}; nearest {near}")
    if draft[RAMP] is not None:
        _check_ramp(draft, unit, product)


def _check_ramp(draft: Draft, unit: int, product: str) -> None:
    first, increment, samples = draft[RAMP]
    total = draft[_TOTAL]
    if first < 1 or increment < 1 or samples < 0 or first > total:
        draft.fail(RAMP, f"is [first batch, increment, samples], from at most {_TOTAL} {total} up, not {draft[RAMP]}")
    for what, value in (("the first batch", first), ("the increment", increment)):
        if value % unit:
            near = nearest_multiples(value, unit)
            draft.fail(RAMP, f"{what}, {value}, is not a multiple of {product}; nearest {near}")
    if (total - first) % increment:
        near = nearest_multiples(total - first, increment)
        draft.fail(RAMP, f"increments of {increment} do not lead from {first} to {_TOTAL} {total}: {near} is between")


def skipped_steps(draft: Draft) -> None:
    """`skip_steps`: ranges of steps, counted from 0."""
    for start, stop in draft["skip_steps"] or ():
        if not 0 <= start < stop:
            draft.fail("skip_steps", f"ranges are [first step, first step after them], not {[start, stop]}")
        draft.note(f"skip_steps: steps {start} to {stop - 1}, counted from 0, consume their samples without an update")


def row_lengths(draft: Draft) -> None:
    """`seq_length_ramp`: lengths that divide `seq_length`, over steps or tokens."""
    ramp, whole = draft[LENGTHS], draft["seq_length"]
    if ramp is None or whole is None:
        return
    start, multiple = ramp.get("start"), ramp.get("multiple", 1)
    if start is None or ("steps" in ramp) == ("tokens" in ramp):
        draft.fail(LENGTHS, f"is {{start, steps}} or {{start, tokens}}, not {{{', '.join(ramp)}}}")
    possible = batch_plan.row_lengths(whole, 1, multiple)
    if start not in possible:
        of = f"{whole} and are multiples of {multiple}" if multiple > 1 else whole
        around = [n for n in possible if n < start][-1:] + [n for n in possible if n > start][:1]
        near = " or ".join(map(str, around))
        draft.fail(f"{LENGTHS}.start", f"{start} is none of the lengths that divide seq_length {of}; nearest {near}")
    lengths = batch_plan.BatchPlan.from_values(draft.__getitem__).lengths
    draft.note(f"{LENGTHS}: rows of " + ", ".join(f"{length} from step {step}" for step, length in lengths))
