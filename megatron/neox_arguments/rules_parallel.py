"""Rules about ranks and batches."""

from __future__ import annotations

from megatron.errors import UserError
from megatron.neox_arguments.draft import Draft, nearest_multiples
from megatron.neox_arguments.rules_chats import chats_batch
from megatron.neox_arguments.rules_ramp import SCHEDULE, last_batch

MOST_SECONDS = 1e8  # three years; torch counts in whole milliseconds
_TOTAL, _MICRO, _GAS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def layout(draft: Draft) -> None:
    """world_size and data_parallel_size from the ranks that run, else global_num_gpus, else num_gpus per node, else
    what one copy of the model needs."""
    draft.not_negative("pipe_parallel_size")
    draft.positive("model_parallel_size", "global_num_gpus", "num_gpus")
    pipe, tensor = stages(draft), draft["model_parallel_size"]
    copy = pipe * tensor
    ranks, origin = _ranks(draft, copy * max(draft["expert_parallel_size"], 1))
    draft.set("world_size", ranks, origin)
    if ranks % copy:
        raise UserError(
            f"{ranks} ranks ({origin}) do not divide into pipe_parallel_size {pipe} x model_parallel_size {tensor} ="
            f" {copy}; nearest {nearest_multiples(ranks, copy)}"
        )
    draft.set("data_parallel_size", ranks // copy, f"{ranks} ranks / (pipeline {pipe} x tensor {tensor})")


def _ranks(draft: Draft, copy: int) -> tuple[int, str]:
    running, stated = draft.facts.num_devices, draft["global_num_gpus"]
    if running is not None:
        if stated is not None and stated != running:
            draft.fail("global_num_gpus", f"is {stated}, but {running} ranks run; leave it out or start {stated}")
        return running, "ranks that run"
    if stated is not None:
        return stated, "global_num_gpus"
    if draft["num_gpus"] is not None:
        nodes = max(draft["num_nodes"], 1)
        return draft["num_gpus"] * nodes, "num_gpus" if nodes == 1 else "num_gpus x num_nodes"
    return copy, "what one copy of the model needs"


def waiting(draft: Draft) -> None:
    """Seconds for which ranks wait for each other: numbers that torch can count."""
    most = f"{MOST_SECONDS:g}"
    draft.check(lambda value: 0 < value < MOST_SECONDS, f"must be above 0 and below {most} s", "distributed_timeout")
    off = f"must be below {most} s (0: none of its own)"
    draft.check(lambda value: value < MOST_SECONDS, off, "collective_timeout", "watchdog_seconds")


def stages(draft: Draft) -> int:
    """Pipeline stages: 0 and 1 both mean one."""
    return max(draft["pipe_parallel_size"], 1)


def batch(draft: Draft) -> None:
    """The batch triangle: train_batch_size = micro x gas x data_parallel_size; what is unset is derived."""
    given = [name for name in (_TOTAL, _MICRO, _GAS) if draft.is_set(name)]
    draft.positive(*given)
    total, micro, gas = (draft.get_given(name) for name in (_TOTAL, _MICRO, _GAS))
    total = last_batch(draft) or total or chats_batch(draft, micro)
    if total is None and micro is None:
        draft.fail(_MICRO, f"must be set, or {_TOTAL} (any two of {_TOTAL}, {_MICRO} and {_GAS} give the third)")
    ranks = draft["data_parallel_size"]
    if total is not None and micro is not None and gas is not None:
        _check_triangle(draft, total, micro, gas, ranks)
    elif total is None:
        gas = gas or 1
        total = micro * gas * ranks
    elif micro is not None:
        gas = _divide(draft, total, micro * ranks, f"micro {micro} x dp {ranks}")
    else:
        gas = gas or 1
        micro = _divide(draft, total, gas * ranks, f"accumulation {gas} x dp {ranks}")
    if draft["deterministic"] == "layout" and micro != 1:
        if draft.is_set(_MICRO):
            draft.note(f"{_MICRO} {micro} becomes 1: deterministic: layout computes one sample at a time")
        micro, gas = 1, micro * gas
        draft.imply(_MICRO, micro, "deterministic")
        draft.imply(_GAS, gas, "deterministic")
    draft.set(_TOTAL, total, f"micro {micro} x accumulation {gas} x dp {ranks}")
    draft.set(_MICRO, micro, f"{total} / (accumulation {gas} x dp {ranks})")
    draft.set(_GAS, gas, f"{total} / (micro {micro} x dp {ranks})")


def _divide(draft: Draft, total: int, unit: int, product: str) -> int:
    if total % unit:
        name = _TOTAL if draft.is_set(_TOTAL) else SCHEDULE
        draft.fail(name, f"{total} is not a multiple of {product} = {unit}; nearest {nearest_multiples(total, unit)}")
    return total // unit


def _check_triangle(draft: Draft, total: int, micro: int, gas: int, ranks: int) -> None:
    if total == micro * gas * ranks:
        return
    ways = [f"{_TOTAL}={micro * gas * ranks}"]
    if total % (micro * ranks) == 0:
        ways.append(f"{_GAS}={total // (micro * ranks)} (or leave it out)")
    if total % (micro * gas) == 0:
        copies = total // (micro * gas)
        ways.append(f"{copies * draft['world_size'] // ranks} ranks (dp {copies})")
    draft.fail(
        _TOTAL,
        f"{total} is not micro {micro} x accumulation {gas} x dp {ranks} = {micro * gas * ranks};"
        f" one of these would fit: {', '.join(ways)}",
    )


def sequence_parallel(draft: Draft) -> None:
    """Sequence parallel splits the tokens of a sample over the tensor-parallel ranks."""
    tensor = draft["model_parallel_size"]
    if draft["sequence_parallel"] and draft["seq_length"] % tensor:
        draft.fail(
            "sequence_parallel",
            f"seq_length {draft['seq_length']} is not a multiple of model_parallel_size {tensor};"
            f" nearest {nearest_multiples(draft['seq_length'], tensor)}",
        )


def pipeline_depth(draft: Draft) -> None:
    """Every pipeline stage needs at least one transformer block."""
    pipe, layers = stages(draft), draft["num_layers"]
    if pipe > layers:
        draft.fail(
            "pipe_parallel_size",
            f"{pipe} stages cannot share {layers} layers: {pipe - layers} stages would hold none;"
            f" use at most {layers} stages",
        )
