"""Rules about the length of a run and the learning rate over it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.forget_steps import TRAIN
from megatron.neox_arguments.formulas import flops_per_token
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.lengths import Length, in_steps, parse_count
from megatron.neox_arguments.optimizer_params import KIND
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.rows import row

LENGTHS = ("train_iters", "train_epochs", "train_tokens", "train_flops")
FILLED = ("lr_cooldown", "lr_cycles", "lr_rewarmup")
SHAPE = ("lr_cooldown", "lr_cooldown_style", "lr_cycles", "lr_rewarmup", "lr_decay_power")
"""What only some styles read: the field `reads` of their rows."""


def length(draft: Draft) -> None:
    """train_iters, from train_epochs, train_tokens or train_flops once what they need is known."""
    draft.positive("train_epochs")
    draft.not_negative("train_iters")
    given = [name for name in LENGTHS if draft.get_given(name) is not None]
    if len(given) > 1:
        draft.fail(given[1], f"{given[0]} is set too ({draft.source(given[0])}); keep one of the two")
    name = given[0] if given else "train_iters"
    if name == "train_epochs" and draft.facts.epoch_samples is not None:
        samples, epochs = draft.facts.epoch_samples, draft["train_epochs"]
        steps = BatchPlan.from_values(draft.__getitem__).only(TRAIN).whole_steps(samples * epochs)
        if steps == 0:
            draft.fail("train_epochs", f"{samples} samples x {epochs} epochs are less than one batch")
        _become_steps(draft, name, steps, f"{epochs} epochs of {samples} samples")
    elif name in ("train_tokens", "train_flops"):
        _count_tokens(draft, name)


def _count_tokens(draft: Draft, name: str) -> None:
    written = draft[name]
    try:
        tokens = parse_count(written, {"train_tokens": "token"}.get(name, ""))
    except ValueError as problem:
        draft.fail(name, str(problem))
    plan = _batch_plan(draft)
    what = f"{tokens:g} tokens"
    if name == "train_flops":
        vocab_size = draft.facts.vocab_size
        if vocab_size is None:
            return
        fields = (field.name for field in dataclasses.fields(ModelConfig))
        each = flops_per_token(ModelConfig(**{field: draft[field] for field in fields}), vocab_size)
        what, tokens = f"{tokens:g} FLOPs of {each:.4g} per token", tokens / each
    if plan is not None:
        _become_steps(draft, name, plan.steps_for_tokens(math.ceil(tokens)), what)


def _become_steps(draft: Draft, name: str, steps: int, what: str) -> None:
    draft.sources["train_iters"] = f"{draft.source(name)}: {what}"
    draft.values.update({"train_iters": steps, name: None})


def _batch_plan(draft: Draft) -> BatchPlan | None:
    """None while it is not known."""
    batch, seq_length = draft["train_batch_size"], draft["seq_length"]
    return BatchPlan.from_values(draft.__getitem__) if batch and seq_length else None


def _steps_for(draft: Draft, found: Length, *, late: bool = False) -> int | None:
    """Steps that a number of steps or tokens is, from the start of the run, or (`late`) with its last batch size; None
    while that is not known."""
    if found.unit == "steps":
        return int(found.number)
    plan = _batch_plan(draft)
    if plan is not None and late:
        plan = BatchPlan.constant(plan.stages[-1][1], plan.tokens_per_sample)
    return None if plan is None else plan.steps_for_tokens(math.ceil(found.number))


def schedule(draft: Draft) -> None:
    """Lengths of the schedule and its parts in steps; min_lr; what the style does not read."""
    with draft.part():
        _min_lr(draft)
    with draft.part():
        if draft["override_lr_scheduler"] and draft["use_checkpoint_lr_scheduler"]:
            draft.fail("override_lr_scheduler", "use_checkpoint_lr_scheduler is set too; keep one of the two")
    with draft.part():
        _shape(draft)
    with draft.part():
        _lengths(draft)


def average(draft: Draft) -> None:
    """The moving average of the weights; an optimizer that averages them itself has that one, and a constant rate."""
    draft.check(lambda decay: 0 < decay < 1, "must be in (0, 1)", "ema_decay")
    kind, style = draft["optimizer_type"], draft["lr_decay_style"]
    if not row(KIND, kind).get("averages"):
        return
    if not draft.is_set("lr_decay_style"):
        draft.imply("lr_decay_style", "constant", "optimizer.type")
    elif style != "constant":
        draft.note(f"{kind} stands in for a schedule: lr_decay_style {style} lowers its rate besides")
    if draft["ema_decay"] is not None:
        draft.fail("ema_decay", f"{kind} averages the weights itself; leave it out")


def _min_lr(draft: Draft) -> None:
    """min_lr, also as a fraction of lr."""
    draft.not_negative("min_lr")
    ratio = draft["min_lr_ratio"]
    if ratio is not None:
        if not 0 <= ratio <= 1:
            draft.fail("min_lr_ratio", f"is a fraction of lr, between 0 and 1, not {ratio:g}")
        if draft.get_given("min_lr") is not None:
            draft.fail("min_lr_ratio", f"min_lr is set too ({draft.source('min_lr')}); keep one of the two")
        draft.sources["min_lr"] = f"{draft.source('min_lr_ratio')}: {ratio:g} of lr {draft['lr']:g}"
        draft.values.update(min_lr=ratio * draft["lr"], min_lr_ratio=None)
    if draft["min_lr"] > draft["lr"]:
        draft.fail("min_lr", f"{draft['min_lr']:g} is above lr {draft['lr']:g}")


def _shape(draft: Draft) -> None:
    """Keys of `SHAPE` have values that make sense, and a style that reads them."""
    style = draft["lr_decay_style"]
    reads = row("lr_decay_style", style).get("reads", ())
    for name in SHAPE:
        if draft[name] != all_keys()[name].default and name not in reads:
            draft.fail(name, f"lr_decay_style: {style} does not read it; leave it out")
    draft.positive("lr_decay_power")
    if draft["lr_cooldown_style"] == "inverse" and not draft["min_lr"] > 0:
        draft.fail("lr_cooldown_style", "inverse needs a min_lr above 0: 1 / rate rises to 1 / min_lr")
    for name in ("lr_cooldown", "lr_rewarmup"):
        draft.set(name, _in_steps(draft, name, draft[name]), "in steps")
    cycles = draft["lr_cycles"]
    if isinstance(cycles, int) and cycles < 1:
        draft.fail("lr_cycles", f"must be 1 or more, is {cycles}")
    if isinstance(cycles, tuple):
        cycles = tuple(_in_steps(draft, "lr_cycles", end) for end in cycles)
    draft.set("lr_cycles", cycles, "in steps")


def _in_steps(draft: Draft, name: str, value: Any) -> Any:
    """A length as it was written, but `500 steps` where that was a number of tokens; shares stay."""
    found = _parse(draft, name, value)
    if found.unit == "share":
        return found.number
    steps = _steps_for(draft, found, late=name != "lr_cycles")
    return value if steps is None else f"{steps} steps"


def _parse(draft: Draft, name: str, value: Any) -> Length:
    try:
        return Length.parse(value)
    except ValueError as problem:
        draft.fail(name, str(problem))


def _lengths(draft: Draft) -> None:
    """lr_decay_iters: as set, else lr_decay_fraction of train_iters, else train_iters. warmup as a share of it."""
    fraction, total = draft["lr_decay_fraction"], draft["train_iters"]
    if fraction is not None and not 0 <= fraction <= 1:
        draft.fail("lr_decay_fraction", f"is a fraction of train_iters, between 0 and 1, not {fraction:g}")
    by_fraction = math.floor(total * fraction) if total is not None and fraction is not None else None
    stated = _stated_steps(draft)
    if isinstance(stated, str):
        return
    if stated is not None and by_fraction is not None and stated != by_fraction:
        draft.note(f"lr_decay_iters {stated} wins over lr_decay_fraction {fraction} ({by_fraction} steps)")
    steps = stated or by_fraction or total
    draft.set("lr_decay_iters", steps, "lr_decay_fraction of train_iters, else train_iters")
    _check_cycles(draft, steps)
    share = _warmup(draft, steps)
    if isinstance(share, float):
        _tell_lengths(draft, steps, total, share)


def _check_cycles(draft: Draft, steps: int | None) -> None:
    """Ends of cycles rise, as far as they are known."""
    cycles = draft["lr_cycles"]
    if not steps or isinstance(cycles, int) or any("token" in str(end) for end in cycles):
        return
    ends = [in_steps(end, steps) for end in cycles]
    if ends != sorted(set(ends)) or (ends and ends[0] <= 0):
        draft.fail("lr_cycles", f"each cycle ends after the one before, not at {', '.join(map(str, cycles))}")
    if ends and ends[-1] >= steps:
        draft.note(f"lr_cycles: cycles end at step {ends[-1]:g}, the schedule (lr_decay_iters) at {steps}")


def _stated_steps(draft: Draft) -> int | str | None:
    """lr_decay_iters as it was set, in steps; as it was written where these are not known yet."""
    value = draft.get_given("lr_decay_iters")
    if isinstance(value, str):
        try:
            plain = float(value)
        except ValueError:
            found = _parse(draft, "lr_decay_iters", value)
            if found.unit == "share":
                draft.fail("lr_decay_iters", f"is a number of steps, or '2B tokens', not {value!r}")
            steps = _steps_for(draft, found)
            if steps is None:
                return value
            value = steps
        else:
            if not math.isfinite(plain) or plain != int(plain):
                draft.fail("lr_decay_iters", f"is a whole number of steps, or '2B tokens', not {value}")
            value = int(plain)
    if value is not None and value <= 0:
        draft.fail("lr_decay_iters", f"must be above 0, is {value}")
    return value


def _warmup(draft: Draft, steps: int | None) -> float | str:
    """warmup as a share of a schedule of `steps`; as it was written while that is not known."""
    written = draft["warmup"]
    found = _parse(draft, "warmup", written)
    known = _steps_for(draft, found) if found.unit != "share" and steps else None
    share: float | str = written
    if found.unit == "share":
        share = found.number
    elif known is not None and steps:
        share = min(1.0, known / steps)
        if known > steps:
            draft.note(
                f"the warm-up (warmup {written}) is longer than the schedule (lr_decay_iters {steps}): the learning "
                f"rate rises to lr {draft['lr']:g} over all of it"
            )
    draft.set("warmup", share, "a share of lr_decay_iters")
    return share


def _tell_lengths(draft: Draft, steps: int | None, total: int | None, share: float) -> None:
    """Notes where the schedule and the run are not equally long."""
    rising = (steps or 0) * share
    if total and round(rising) > total:
        last = draft["lr"] * max(1, total - 1) / rising
        draft.note(
            f"training never leaves the warm-up, which is {rising:.0f} steps (warmup {share:g} of"
            f" lr_decay_iters {steps}) where train_iters is {total}: the learning rate ends at {last:.3g}, lr is"
            f" {draft['lr']:g}. lr_decay_iters={total} shortens both"
        )
    elif draft["lr_decay_style"] != "constant" and steps and total and steps != total:
        if steps > total:
            draft.note(f"the learning rate does not reach its end: lr_decay_iters {steps} > train_iters {total}")
        else:
            draft.note(f"the learning rate stays at its end value from step {steps} of {total} on (lr_decay_iters)")
