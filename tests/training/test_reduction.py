"""Gradients of data-parallel ranks are added up in fp32, whatever DeepSpeed keeps them in, at every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.mpu.sharding import spec_of
from tests.distributed import run_distributed
from tests.training.models import EXPERTS
from tests.training.test_precision import fp16_allowed, fp16_keys
from tests.training.tiny import LLAMA, NEOX, Layout, build, step_batch

pytestmark = pytest.mark.cpu

BF16 = {"precision": "bfloat16"}
TYPES = {"bfloat16": torch.bfloat16, "fp16": torch.float16}
# The sum of 1 and this does not fit into the type: bf16 has 8 bits, fp16 11.
SMALL = {"bfloat16": 2.0**-9, "fp16": 2.0**-12}


def reduced(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> dict[str, tuple[float, float, float]]:
    """(smallest, largest, expected) value of the gradient of each parameter, by name: the first half of the data ranks
    has gradients of 1 everywhere, the others of SMALL."""
    with fp16_allowed():
        engine, args, _ = build(rank, keys, layout)
    state, small = engine.state, SMALL[args.optimizer.precision]
    values = [1.0 if data_rank < layout.dp / 2 else small for data_rank in range(layout.dp)]
    gas = args.training.gradient_accumulation_steps
    for p in engine.params().values():
        p.register_hook(lambda gradient: torch.full_like(gradient, values[state.dp_rank]))
    found = {}

    def look() -> None:
        for name, gradient in engine.grads().items():
            spec = spec_of(engine.params()[name])
            ranks = list(range(layout.dp))
            if spec.experts and layout.ep > 1:
                group = state.group("expert_data")
                holders = [rank] if group is None else dist.get_process_group_ranks(group)
                ranks = [holder % layout.dp for holder in holders]  # no pipeline and tensor parallelism here
            tied = 2 if "word_embeddings" in spec.key and layout.pp > 1 else 1  # a copy on each stage
            expected = tied * gas * sum(values[data_rank] for data_rank in ranks) / layout.dp
            if gradient.numel():
                found[name] = (float(gradient.min()), float(gradient.max()), expected)

    engine.before_update = look
    engine.train_batch(step_batch(0, args, state), lr=0.0)
    return found


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        (BF16, Layout(dp=2, micro=4, zero=1)),
        (BF16, Layout(dp=2, micro=2, zero=2)),
        (BF16, Layout(dp=2, micro=2, zero=3)),
        (BF16, Layout(pp=2, dp=2, micro=2, zero=1)),  # LLAMA's embedding is tied
        (fp16_keys(), Layout(dp=2, micro=2, zero=2)),
        ({**NEOX, **EXPERTS, **BF16}, Layout(dp=4, micro=1, zero=1, ep=2)),
    ],
    ids=lambda x: getattr(x, "name", x.get("precision") if isinstance(x, dict) else x),
)
def test_gradients_are_added_up_in_fp32(keys, layout):
    keys = {**LLAMA, **keys}
    reports = run_distributed(reduced, layout.world, keys, layout, timeout=110)
    assert all(reports)
    for rank, report in enumerate(reports):
        for name, (low, high, expected) in report.items():
            assert low == high == expected, f"{name} on rank {rank} at {layout.name}"
        whole = torch.tensor([expected for *_, expected in report.values()])
        assert not torch.equal(whole, whole.to(TYPES[keys["precision"]]).float()), "every sum fits"
