"""A cluster with less memory per GPU: smaller micro-batches, as many more accumulation steps, the same global batch."""

from __future__ import annotations

from megatron.errors import UserError
from megatron.neox_arguments.draft import nearest_multiples
from megatron.neox_arguments.merge import FlatValues

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def split_micro_batches(merged: FlatValues, multiplier: int, rule: str) -> dict[str, int]:
    """What to set so that a micro-batch has `1 / multiplier` of its samples and a step the samples that it had.

    A member of train_batch_size = micro-batch x accumulation x data-parallel ranks that is not set and still follows
    from the other two is left to follow. `rule` names the rule in messages. Raises `UserError` with the nearest numbers
    when the micro-batch cannot be divided.
    """
    if multiplier == 1:
        return {}
    total, micro, steps = (merged.values.get(name) for name in (TOTAL, MICRO, ACCUMULATION))
    total = total or merged.values.get("batch_size_schedule")
    if micro is None:  # it follows from the global batch, which the configuration's own rules divide or refuse
        return {} if total is None else {ACCUMULATION: (steps or 1) * multiplier}
    if micro % multiplier:
        raise UserError(
            f"{merged.sources[MICRO]}: {MICRO}: {micro} is not a multiple of {multiplier}, by which {rule} divides it;"
            f" nearest {nearest_multiples(micro, multiplier)}"
        )
    if total is not None and steps is None:
        return {MICRO: micro // multiplier}
    return {MICRO: micro // multiplier, ACCUMULATION: (steps or 1) * multiplier}
