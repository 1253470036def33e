"""Mamba on a GPU: plain torch against the recurrence in fp64, and the fused kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.layers.mamba_kernels import choose_kernels
from tests.layers.test_mamba import OPTIONS, head_by_head, heads_inputs, selective_inputs, token_by_token

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
# share of the largest value; bf16 keeps 8 bits
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
REFERENCES = {"mamba": token_by_token, "mamba2": head_by_head}


def problem(kind: str, dtype: torch.dtype, s: int = 300) -> tuple[list[Tensor], Tensor]:
    """(x, raw step sizes, a, b, c as a layer has them, the steps' bias) on the GPU."""
    made = selective_inputs(s, 2, 64, 16) if kind == "mamba" else heads_inputs(s, 2, heads=4, p=16, n=16)
    x, dt, a, b, c = (part.to(GPU) for part in made)
    inputs = [x.to(dtype), (dt / 4 - 1).to(dtype), a.float(), b.to(dtype), c.to(dtype)]
    bias = torch.linspace(-1, 1, dt.shape[2], device=GPU)
    return [part.requires_grad_() for part in inputs], bias


def run(kernels, inputs: list[Tensor], bias: Tensor, starts: Tensor | None = None) -> tuple[Tensor, ...]:
    """y, the last state and the gradients."""
    x, dt, a, b, c = inputs
    y, last = kernels.scan(x, dt, bias, a, b, c, starts, None)
    return y.detach(), last.detach(), *gradients_on(y, inputs)


def gradients_on(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return torch.autograd.grad((y * weights).sum(), inputs)


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], tolerance: float) -> None:
    for mine, expected in zip(found, wanted, strict=True):
        error = (mine.double() - expected.double()).abs().max()
        assert error < tolerance * expected.abs().max(), (error, expected.abs().max())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", list(REFERENCES))
def test_plain_torch_is_the_recurrence(kind: str, dtype: torch.dtype, documents: bool) -> None:
    inputs, bias = problem(kind, dtype)
    starts = (torch.arange(300, device=GPU) % 70 == 0).expand(2, 300) if documents else None
    plain = choose_kernels(kind, GPU, **{**OPTIONS, "conv": False, "scan": False})
    found = run(plain, inputs, bias, starts)
    exact = [part.detach().double().requires_grad_() for part in inputs]
    x, dt, a, b, c = exact
    steps = torch.nn.functional.softplus(dt + bias)
    y, last = REFERENCES[kind](x, steps, a, b, c, starts)
    last = last.transpose(1, 2) if kind == "mamba" else last
    check(found, (y.detach(), last.detach(), *gradients_on(y, exact)), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", list(REFERENCES))
def test_the_fused_kernels_compute_what_plain_torch_does(kind: str) -> None:
    pytest.importorskip("mamba_ssm")
    inputs, bias = problem(kind, torch.bfloat16, 320)
    fused, plain = (choose_kernels(kind, GPU, **{**OPTIONS, "scan": wanted}) for wanted in (True, False))
    assert "scan mamba-ssm" in fused.names
    check(run(fused, inputs, bias), run(plain, inputs, bias), 4 * TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("documents", [False, True])
def test_the_fused_convolution_computes_what_plain_torch_does(documents: bool) -> None:
    pytest.importorskip("causal_conv1d")
    fused, plain = (choose_kernels("mamba", GPU, **{**OPTIONS, "conv": wanted}) for wanted in (True, False))
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(GPU).bfloat16().requires_grad_()
        for shape in ((2, 320, 64), (64, 1, 4), (64,))
    )
    ids = (torch.arange(320, device=GPU) // 70).expand(2, 320) if documents else None
    results = []
    for kernels in (fused, plain):
        y = kernels.conv(x, weight, bias, ids, None)
        results.append((y.detach(), *gradients_on(y, [x, weight, bias])))
    check(results[0], results[1], TOLERANCE[torch.bfloat16])
