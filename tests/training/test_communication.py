"""What data-parallel ranks exchange in a step: operations, types and bytes, by key."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_distributed
from tests.training.models import EXPERTS
from tests.training.test_precision import fp16_allowed, fp16_keys
from tests.training.tiny import NEOX, Layout, build, step_batch

pytestmark = pytest.mark.cpu

FP32, BF16, FP16 = {"precision": "fp32"}, {"precision": "bfloat16"}, fp16_keys()
Sent = dict[tuple[str, torch.dtype], float]


class Collectives(TorchDispatchMode):
    """Bytes of what each kind of collective operation works on, by type; not of losses, norms and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            most = max(tensors, key=torch.Tensor.numel, default=torch.empty(0))
            if most.numel() > 50:
                self.found[name, most.dtype] += sum(x.nbytes for x in tensors) if "coalesced" in name else most.nbytes
        return func(*args, **(kwargs or {}))


def exchanged(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> Sent:
    """Bytes per parameter of this rank."""
    with fp16_allowed():
        engine, args, lr = build(rank, {**NEOX, **keys}, layout)
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    with Collectives() as counter:
        engine.train_batch(step_batch(1, args, engine.state), lr(1))
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in engine.params().values())
    return {kind: size / whole for kind, size in counter.found.items()}


REDUCE, SCATTER, GATHER = "allreduce_", "_reduce_scatter_base_", "_allgather_base_"
F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
MIXTURE = {**BF16, **EXPERTS}
# Two micro-batches per step.
CASES: list[Any] = [
    (FP32, Layout(dp=2), {(REDUCE, F32): 4}),
    (FP16, Layout(dp=2, zero=1), {(REDUCE, F32): 4, (GATHER, F16): 2}),
    (BF16, Layout(dp=2, zero=2), {(REDUCE, F32): 8, (GATHER, B16): 2}),
    (BF16, Layout(pp=2, dp=2, zero=1), {(SCATTER, F32): 4, (GATHER, B16): 2}),
    (MIXTURE, Layout(dp=4, micro=1, zero=1, ep=2), {(SCATTER, F32): 4, (GATHER, B16): 2}),
]
MORE: list[Any] = [
    (FP32, Layout(dp=2, zero=1), {(REDUCE, F32): 4, (GATHER, F32): 4}),
    (FP32, Layout(dp=2, zero=2), {(REDUCE, F32): 8, (GATHER, F32): 4}),
    (FP16, Layout(dp=2, zero=2), {(REDUCE, F32): 8, (GATHER, F16): 2}),
    (FP32, Layout(dp=2, engine="native"), {(SCATTER, F32): 4, (GATHER, F32): 4}),
]
CASES += [pytest.param(*case, marks=pytest.mark.full) for case in MORE]


@pytest.mark.parametrize(("keys", "layout", "expected"), CASES)
def test_bytes_of_a_step_by_operation_and_type(
    keys: dict[str, Any], layout: Layout, expected: dict[tuple[str, torch.dtype], int]
) -> None:
    for found in run_distributed(exchanged, layout.world, keys, layout):
        between_data_ranks = {kind: size for kind, size in found.items() if kind[0] not in ("send", "recv_")}
        assert between_data_ranks == {kind: pytest.approx(size, rel=0.05) for kind, size in expected.items()}
