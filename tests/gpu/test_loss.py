"""The loss with its element-wise part compiled, on a GPU: numbers, and memory that holds one chunk of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu.cross_entropy import Projection, linear_cross_entropy, weighted_linear_cross_entropy
from megatron.mpu.product_sums import add_product, sums_products
from megatron.mpu.state import ParallelState

pytestmark = pytest.mark.gpu

VOCAB, PADDED, HIDDEN, TOKENS, CHUNK = 1000, 1024, 64, 600, 256  # the last chunk is shorter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("form", ["", "bias", "bias and cap"])
def test_values_and_gradients(form: str, compiled: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator, device="cuda")
    weights = torch.rand(TOKENS, generator=generator, device="cuda")
    inputs = [hidden, weight]
    if form:
        inputs.append(torch.randn(PADDED, generator=generator, device="cuda").to(dtype).requires_grad_())
    cap = 5.0 if "cap" in form else None
    exact = [x.detach().double().requires_grad_() for x in inputs]
    logits = exact[0] @ exact[1][:VOCAB].T + sum(bias[:VOCAB] for bias in exact[2:])
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    losses = F.cross_entropy(logits, targets, reduction="none")
    wanted = torch.autograd.grad((losses * weights).sum(), exact)
    projection = Projection(VOCAB, ParallelState.single("cuda"), CHUNK, compiled, cap)
    options = (projection, inputs[2] if form else None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    total, mine = weighted_linear_cross_entropy(hidden, weight, targets, weights, *options)
    for got in (mine, linear_cross_entropy(hidden, weight, targets, *options)):
        assert got.dtype == torch.float32 and (got - losses).abs().max() < tolerance * losses.abs().max()
    per_token = (linear_cross_entropy(hidden, weight, targets, *options) * weights).sum()
    for value in (total, per_token):
        for got, reference in zip(torch.autograd.grad(value, inputs), wanted, strict=True):
            assert got.dtype == dtype
            assert (got - reference).abs().max() < tolerance * reference.abs().max()


def test_a_chunk_of_logits_is_all_that_exists() -> None:
    hidden = torch.randn(8192, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8192, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(8192, (8192,), device="cuda")
    projection = Projection(8192, ParallelState.single("cuda"), compiled=True)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        total, _ = weighted_linear_cross_entropy(hidden, weight, targets, torch.ones(8192, device="cuda"), projection)
        total.backward()
    # Whole logits would be 134 MB in bf16; a chunk is 8 MB, and its gradient as much.
    assert torch.cuda.max_memory_allocated() - before < 40e6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_add_to_fp32_sums(dtype: torch.dtype) -> None:
    """cuBLAS's own addition, to the first rows of a larger sum and from a transposed factor, as the loss asks."""
    assert sums_products(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(CHUNK, n, generator=generator, device="cuda").to(dtype) for n in (VOCAB, HIDDEN))
    whole = torch.ones(PADDED, HIDDEN, device="cuda")
    whole[:VOCAB] = torch.nan
    for first in (True, False, False):
        add_product(whole[:VOCAB], a.t(), b, first)
    exact = 3 * (a.double().t() @ b.double())
    assert (whole[:VOCAB] - exact).abs().max() < 1e-5 * exact.abs().max() and (whole[VOCAB:] == 1).all()
