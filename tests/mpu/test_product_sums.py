"""Gradients of weights that their products add to fp32 sums, against the plain formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from megatron.mpu.layers import linear
from megatron.mpu.product_sums import offer_sum, sums_products
from tests.product_sums import summing

pytestmark = pytest.mark.cpu


class Layer(nn.Module):
    """Two products, one with a bias; their sums lie next to each other in one piece of memory, as in a bucket."""

    def __init__(self, memory: Tensor, arrived: Callable[[str], None]) -> None:
        super().__init__()
        self.up, self.down = (Parameter(torch.randn(s).bfloat16()) for s in ((6, 4), (4, 6)))
        self.bias = Parameter(torch.randn(6).bfloat16())
        self.totals = dict(zip(("up", "down"), memory.view(2, 24).unbind(), strict=True))
        self.begun = {name: torch.zeros((), dtype=torch.bool) for name in self.totals}
        for name, total in self.totals.items():
            arrival = offer_sum(getattr(self, name), total, self.begun[name])
            arrival.register_post_accumulate_grad_hook(partial(_note, arrived, name))

    def forward(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.up, self.bias).tanh(), self.down)


def _numbered(arrived: list[str], index: int, name: str) -> None:
    arrived.append(f"{name}{index}")


def _note(arrived: Callable[[str], None], name: str, arrival: Tensor) -> None:
    arrived(name)


def _way(name: str) -> Callable[[nn.Module, Tensor], Tensor]:
    if name == "recomputed":
        return lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    return lambda layer, x: layer(x)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("way", ["plain", "recomputed"])
@pytest.mark.parametrize(
    "backend", [None, "aot_eager", pytest.param("inductor", marks=[pytest.mark.full, pytest.mark.slow])]
)
def test_products_add_to_the_sums(backend: str | None, way: str, together: bool) -> None:
    """Two layers, which share their graphs, and three passes of which the first writes over what was there; `together`:
    as a pipeline does, all forward passes first. Each weight arrives once per pass, and has no gradient itself."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    arrived: list[str] = []
    memory = torch.full((2, 48), torch.nan)
    layers = [Layer(memory[i], partial(_numbered, arrived, i)) for i in range(2)]
    if backend:
        for layer in layers:
            layer.compile(fullgraph=True, backend=backend)
    exact = [
        (layer.up.detach().double(), layer.down.detach().double(), layer.bias.detach().double()) for layer in layers
    ]
    wanted: list[Tensor] = [weight.requires_grad_() for weights in exact for weight in weights]
    call, waiting = _way(way), []
    with summing() as products:
        for _ in range(3):
            x = torch.randn(5, 4).bfloat16().requires_grad_()
            y, reference = x, x.detach().double()
            for layer, (up, down, bias) in zip(layers, exact, strict=True):
                y, reference = call(layer, y), F.linear(F.linear(reference, up, bias).tanh(), down)
            reference.sum().backward()
            waiting.append(y.sum())
            if not together:
                waiting.pop().backward()
        for loss in waiting:
            loss.backward()
    for i, layer in enumerate(layers):
        for weight, name in zip(wanted[3 * i : 3 * i + 2], ("up", "down"), strict=True):
            found = layer.totals[name].view(weight.shape)
            exactly: Tensor | None = weight.grad
            assert exactly is not None
            assert (found - exactly).abs().max() < 0.02 * exactly.abs().max(), (i, name)
            assert getattr(layer, name).grad is None and bool(layer.begun[name])
        exactly, ours = wanted[3 * i + 2].grad, layer.bias.grad
        assert exactly is not None and ours is not None
        assert (ours - exactly).abs().max() < 0.02 * exactly.abs().max()
    assert sorted(arrived) == sorted(3 * ["up0", "down0", "up1", "down1"])
    assert sorted(shape[3:] for shape in products) == 8 * [()] + 4 * [(0,)]
    if backend:
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_plain_product(mode: Callable[[], Any]) -> None:
    layer, x = Layer(torch.zeros(48), lambda name: None), torch.randn(5, 4).bfloat16()
    expected = F.linear(F.linear(x, layer.up, layer.bias).tanh(), layer.down)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with mode():
        assert torch.equal(layer(x), expected) and torch.equal(compiled(x), expected)


def test_another_use_of_a_weight_gives_it_a_gradient() -> None:
    layer = Layer(torch.zeros(48), lambda name: None)
    x = torch.randn(5, 4).bfloat16()
    (linear(x, layer.up).sum() + 2 * layer.up.sum()).backward()
    assert layer.up.grad is not None and bool((layer.up.grad == 2.0).all())
    torch.testing.assert_close(layer.totals["up"].view(6, 4), x.float().sum(0).expand(6, 4), rtol=0.02, atol=0.02)


def test_a_device_whose_products_do_not_add_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands in for it: torch itself refuses there what is tried, or gives what a wrong product would."""
    ones, gpu = torch.ones, torch.device("cuda")
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **named: ones(*shape, **named))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = []
    for factor in (None, 0, 1):
        sums_products.cache_clear()
        if factor is not None:
            monkeypatch.setattr(torch, "addmm", partial(_adding, factor))
        found.append(sums_products(gpu))
    sums_products.cache_clear()
    assert found == [False, False, True] and not sums_products(torch.device("cpu"))


def _adding(factor: int, total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> None:
    out += factor * (a.to(out_dtype) @ b.to(out_dtype))
