"""DeepSpeed's ZeRO optimizers, also with offloaded state, against plain torch in fp64; what they add to a step."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import run_distributed
from tests.training.models import NEOX
from tests.training.test_optimizers import OFFLOAD
from tests.training.test_precision import fp16_allowed, fp16_keys
from tests.training.test_reference import hf_twin, neox_weights, unpad
from tests.training.tiny import Layout, build, global_batch, step_batch, whole_state

pytestmark = pytest.mark.cpu

CLIP, LR, BAD = 1e-2, 10.0, 1  # the second step has a gradient that is not finite
SGD = {
    **NEOX,
    "num_kv_heads": 4,
    "optimizer": {"type": "sgd", "params": {"lr": LR, "momentum": 0.9}},
    "weight_decay": 0.0,
    "gradient_clipping": CLIP,
}
STAGES = [
    *({"stage": stage} for stage in (1, 2, 3)),
    *({"stage": stage, **OFFLOAD} for stage in (1, 2, 3)),
]
Weights = dict[str, torch.Tensor]


def _with_zero(rank: int, keys: dict[str, Any], layout: Layout, zero: dict[str, Any]) -> tuple[Any, Any, Any]:
    given = layout.keys() | {"zero_optimization": zero}
    with mock.patch.object(Layout, "keys", lambda self: given):
        return build(rank, keys, layout)


def _weights(engine: Any) -> Weights:
    return {name: values["weight"].double() for name, values in whole_state(engine).items()}


def _curves(rank: int, world: int) -> list[tuple[Weights, list[float], int, Weights]]:
    """(weights, norms, skipped steps, weights) of three steps of each of STAGES."""
    found = []
    for zero in STAGES:
        engine, args, _ = _with_zero(rank, SGD, Layout(dp=2, micro=2), zero)

        def spoil(engine: Any = engine) -> None:
            for gradient in engine.grads().values():
                gradient.view(-1)[:1] = torch.nan

        start, norms = _weights(engine), []
        for step in range(3):
            engine.before_update = spoil if step == BAD else None
            norms.append(float(engine.train_batch(step_batch(step, args, engine.state), LR).grad_norm))
        found.append((start, norms, int(engine.skipped_steps), _weights(engine)))
    return found


def test_clipping_norm_and_skipped_steps_are_those_of_plain_torch() -> None:
    for zero, (start, norms, skipped, end) in zip(STAGES, run_distributed(_curves, 2, timeout=150)[0], strict=True):
        model = hf_twin("neox")
        model.load_state_dict({n: unpad(n, v) for n, v in neox_weights(start).items()}, strict=False)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for step in range(3):
            if step == BAD:
                assert norms[step] != norms[step]
                continue
            tokens, mask = (torch.from_numpy(x) for x in global_batch(step))
            logits = model(tokens[:, :-1]).logits
            each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            optimizer.zero_grad()
            ((each * mask).sum() / mask.sum()).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            assert float(norm) > 50 * CLIP and norms[step] == pytest.approx(float(norm), rel=1e-4), zero
            optimizer.step()
        assert skipped == 1, zero
        ours = neox_weights(end)
        change = torch.cat([(p.detach() - before[name]).view(-1) for name, p in model.named_parameters()])
        difference = torch.cat([(unpad(n, ours[n]) - p.detach()).view(-1) for n, p in model.named_parameters()])
        assert float(difference.norm()) < 1e-3 * float(change.norm()), zero


def _scaled(rank: int, world: int, window: int) -> tuple[list[float], Weights, Weights]:
    """(loss scales, weights before and after) four steps in fp16."""
    keys = {**SGD, **fp16_keys(loss_scale_window=window), "gradient_clipping": 0.0}
    with fp16_allowed():
        engine, args, _ = build(rank, keys, Layout())
    start = _weights(engine)
    scales = [engine.train_batch(step_batch(step, args, engine.state), 0.1).loss_scale for step in range(4)]
    return scales, start, _weights(engine)


def test_a_loss_scale_that_grows_does_not_change_the_step_it_grows_in() -> None:
    (steady, start, expected), (grown, _, found) = (run_distributed(_scaled, 1, window)[0] for window in (100, 2))
    assert steady[-1] < grown[-1]
    flat, other = ([w[name].view(-1) - start[name].view(-1) for name in start] for w in (expected, found))
    change, difference = torch.cat(flat), torch.cat(flat) - torch.cat(other)
    assert float(difference.norm()) < 1e-2 * float(change.norm())


class Passes(TorchDispatchMode):
    """Counts operators over more than a few elements that look for overflow, compute a norm or scale."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {
            "isinf",
            "isnan",
            "isfinite",
            "linalg_vector_norm",
            "norm",
            "_foreach_norm",
            "mul_",
            "_foreach_mul_",
        }:
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if first.numel() > 50:
                self.found[name] += 1
        return func(*args, **(kwargs or {}))


def _passes(rank: int, world: int, precision: str, stage: int) -> Counter[str]:
    """Of an update in the second step."""
    keys = {**NEOX, **(fp16_keys() if precision == "fp16" else {"precision": precision})}
    with fp16_allowed():
        engine, args, lr = build(rank, keys, Layout(dp=2, micro=4, zero=stage))
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    passes, take = Passes(), engine._take_update

    def counted(loss: Any) -> Any:
        with passes:
            return take(loss)

    engine._take_update = counted
    engine.train_batch(step_batch(1, args, engine.state), lr(1))
    return passes.found


@pytest.mark.parametrize(
    ("precision", "stage"), [*itertools.product(["bfloat16", "fp16"], [2, 3]), ("fp32", 1), ("fp32", 2)]
)
def test_an_update_looks_at_the_gradients_once(precision: str, stage: int) -> None:
    for found in run_distributed(_passes, 2, precision, stage):
        assert found == {"_foreach_norm": 1}
