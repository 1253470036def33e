"""Expert parallelism in DeepSpeed: its own machinery for experts, applied to ours.

DeepSpeed reduces the gradients of its own expert layers over the ranks that hold the same experts, divided by all
data-parallel ranks (an expert's gradient holds the tokens of its whole group "expert" already), and its bf16 optimizer
deals their masters out over the same ranks. It knows such parameters by attributes of parameter, optimizer group and
engine, which are set here. What it cannot do (experts under the other ZeRO optimizers, saving them) is refused in
neox_arguments/rules_parallel and done in checkpoint/.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine
from deepspeed.utils import groups as deepspeed_groups
from torch.nn import Parameter

from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState

_NAME = "experts"


def split_expert_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Optimizer groups in which experts have groups of their own, marked as DeepSpeed wants it."""
    found: list[dict[str, Any]] = []
    for group in groups:
        others = [p for p in group["params"] if not spec_of(p).experts]
        experts = [p for p in group["params"] if spec_of(p).experts]
        if others:
            found.append({**group, "params": others})
        if experts:
            found.append({**group, "params": experts, "moe": True, "name": _NAME})
    return found


@contextmanager
def expert_parallel(params: Iterable[Parameter], state: ParallelState) -> Iterator[bool]:
    """`deepspeed.initialize` in here sees which parameters are experts, and who holds the same.

    Yields whether there are any to keep apart (not on a pipeline stage without them).
    """
    experts = [p for p in params if spec_of(p).experts] if state.ep_size > 1 else []
    if not experts:
        yield False
        return
    for p in experts:
        p.allreduce, p.group_name = False, _NAME  # type: ignore[attr-defined]
    same = state.group("expert_data") or deepspeed.comm.new_group([state.rank])
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[_NAME] = same
    optimizer = deepspeed.runtime.engine.BF16_Optimizer

    def with_experts(*arguments: Any, **named: Any) -> Any:
        return optimizer(*arguments, **{**named, "has_moe_layers": True})

    deepspeed.runtime.engine.BF16_Optimizer = with_experts
    try:
        yield True
    finally:
        deepspeed.runtime.engine.BF16_Optimizer = optimizer
