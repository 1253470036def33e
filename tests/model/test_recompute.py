"""Activation checkpointing changes what is kept, and not one bit of loss or gradient, with dropout on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from megatron.errors import UserError
from megatron.layers.moe.balancing import moe_layers
from megatron.model.recompute import Recompute, keep_or_recompute, recompute_in_backward
from tests.model.networks import batch, build, tiny

pytestmark = pytest.mark.cpu

POLICIES: list[dict[str, Any]] = [
    {"checkpoint_activations": True},
    {"checkpoint_policy": "full"},
    {"checkpoint_policy": "selective"},
    {"checkpoint_policy": "full", "checkpoint_num_layers": 2},
    {"checkpoint_policy": "full", "checkpoint_num_layers": 3},
    {"checkpoint_policy": "full", "checkpoint_num_layers": 9},
    {"checkpoint_policy": "selective", "checkpoint_num_layers": 2},
]


def _step(changes: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    network = build(tiny(num_layers=4, hidden_dropout=0.2, attention_dropout=0.2, **changes))
    tokens, positions, targets = batch()
    torch.manual_seed(9)
    loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([0.1])))
    loss.backward()
    return loss.detach(), [p.grad for p in network.parameters()]


@pytest.mark.parametrize("changes", POLICIES, ids=str)
@pytest.mark.parametrize("form", [{}, {"gpt_j_residual": True}, {"intra_document_masking": True}], ids=str)
def test_bit_equal_with_dropout(changes: dict[str, Any], form: dict[str, Any]) -> None:
    plain_loss, plain = _step(form)
    loss, gradients = _step({**form, **changes})
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(mine, expected) for mine, expected in zip(gradients, plain, strict=True))


class _Count(TorchDispatchMode):
    """Counts matrix products (and the attention kernel) and normalisations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.matmuls += name in ("aten.mm.default", "aten.addmm.default") or "attention_for_cpu.default" in name
        self.norms += name == "aten.native_layer_norm.default"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "matmuls", "norms"),
    [
        ({}, 0, 0),
        ({"checkpoint_policy": "full"}, 4 * 5, 4 * 2),
        ({"checkpoint_policy": "selective"}, 0, 4 * 2),
        ({"checkpoint_policy": "full", "checkpoint_num_layers": 2}, 4 * 5, 4 * 2),
        ({"checkpoint_policy": "selective", "checkpoint_num_layers": 4}, 0, 4 * 2),
    ],
    ids=str,
)
def test_what_backward_computes_again(changes: dict[str, Any], matmuls: int, norms: int) -> None:
    """Four blocks of five dear operators (QKV, attention, dense, two MLP products) and two norms.

    torch stops recomputing when the last needed tensor is back, so the final product of a chunk is not repeated.
    """
    counts = []
    for settings in ({}, changes):
        network = build(tiny(num_layers=4, **settings))
        tokens, positions, targets = batch()
        loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([0.1])))
        with _Count() as count:
            loss.backward()
        counts.append(count)
    chunks = 4 // max(1, changes.get("checkpoint_num_layers", 1))
    saved_by_early_stop = chunks if matmuls else 0
    assert counts[1].matmuls - counts[0].matmuls == matmuls - saved_by_early_stop
    assert counts[1].norms - counts[0].norms == norms


MOE: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_router_type": "topk",
    "moe_top_k": 2,
    "activation": "swiglu",
    "moe_intermediate_size": 24,
}


class _Names(TorchDispatchMode):
    """Counts every operator by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grouped", [False, True])
def test_products_of_experts_are_kept(grouped: bool) -> None:
    """As torch's grouped product, which a GPU uses, and as our operator with one product per expert."""
    counts = []
    for policy in ("none", "selective"):
        network = build(tiny(**MOE, checkpoint_policy=policy))
        for layer in moe_layers(network).values():
            layer.experts.grouped = frozenset({torch.float32} if grouped else ())
        tokens, positions, targets = batch()
        loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([0.1])))
        with _Names() as names:
            loss.backward()
        counts.append(names.found["aten::_grouped_mm" if grouped else "deepy::grouped_linear"])
    # Two products of two layers, whose two gradients are grouped products as well.
    assert counts == [8, 8] if grouped else [0, 0]


def _as_package(name: str) -> Callable[[Tensor], Tensor]:
    """An operator that a package outside of torch would define, with the gradient of a copy."""
    operator = torch.library.custom_op(name, lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_autograd(lambda context, gradient: gradient)
    return operator


@pytest.mark.parametrize(
    ("name", "again"),
    [("flash_attn::_flash_attn_forward", 0), ("flash_attn::_flash_attn_varlen_forward", 0), ("strange::operator", 1)],
)
def test_attention_of_the_flash_attn_package_is_kept(name: str, again: int) -> None:
    operator = _as_package(name)
    x = torch.randn(3, requires_grad=True)
    y = recompute_in_backward(lambda x: (operator(x.sin()) ** 2).sum(), "selective", x)
    with _Names() as names:
        y.backward()
    assert names.found[name] == again and names.found["aten::sin"] == 1


def test_flex_attention_is_kept() -> None:
    """A graph's operator that torch cannot run backward on a CPU: what the policy says of it."""
    from torch._higher_order_ops.flex_attention import flex_attention

    kept = [keep_or_recompute(None, operator) for operator in (flex_attention, torch.ops.aten.sin.default)]
    assert kept == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]


def test_nothing_is_recomputed_without_gradients() -> None:
    network = build(tiny(checkpoint_policy="full"))
    tokens, positions, _ = batch()
    with torch.no_grad(), _Count() as count:
        network((tokens, positions)).logits()
    assert count.norms == 5


@pytest.mark.parametrize(("policy", "every"), [("some", 1), ("full", 0)])
def test_nonsense_is_refused(policy: str, every: int) -> None:
    with pytest.raises(UserError, match="checkpoint_"):
        Recompute(policy, every)
