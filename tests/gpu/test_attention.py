"""Attention back-ends on a GPU: the formula in fp32 is the reference, in bf16 and fp16, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.layers.attention_backends import choose_backend
from megatron.layers.attention_contract import ATTENTION_BACKENDS, Call, Task
from megatron.layers.documents import Documents
from megatron.layers.positions.alibi import alibi_slopes

pytestmark = pytest.mark.gpu

B, S, N, D = 2, 384, 8, 64
BACKENDS = ("torch", "cudnn", "varlen", "flex", "flash")
# share of the largest value; bf16 keeps 8 bits, fp16 11
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def usable(name: str, **task: Any) -> Any:
    """The back-end; a skip where it is flash and its package is not installed."""
    if name == "flash":
        pytest.importorskip("flash_attn")
    return choose_backend(Task(torch.device("cuda"), **task), name).backend


def inputs(kv_heads: int, dtype: torch.dtype, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v cut from one fused tensor, as in the layer."""
    generator = torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(B, S, N + 2 * kv_heads, width, generator=generator, device="cuda").to(dtype)
    return fused.split((N, kv_heads, kv_heads), dim=2)


def document_ids() -> Tensor:
    """Short and long documents, other ones in each row, the last one as padding has it: a number of its own."""
    cuts = torch.tensor([[5, 130, 131, 300], [64, 128, 250, 383]], device="cuda")
    places = torch.arange(S, device="cuda")
    return (places[None, :, None] >= cuts[:, None, :]).sum(-1)


def rules_of(case: str, backend: Any, dtype: torch.dtype) -> dict[str, Any]:
    window = 40 if "window" in case else None
    rules: dict[str, Any] = {"causal": True, "scale": 0.2, "window": window}
    if "documents" in case:
        form = backend.form_for(torch.empty(0, dtype=dtype, device="cuda"))
        rules["documents"] = Documents(document_ids()).prepare({(form, window)})
    if "capped" in case:
        rules["softcap"] = 1.5  # scores are up to 8
    if "alibi" in case:
        rules["slopes"] = torch.tensor(alibi_slopes(N), device="cuda")
    return rules


CASES = ("causal", "window", "documents", "documents window", "alibi", "documents alibi")
CAPPED = ("causal capped", "window capped", "documents window capped", "alibi capped")


# FlexAttention compiles for each type, so one is enough there; varlen refuses ALiBi (below).
COMBINATIONS = [
    (name, case, dtype)
    for name in BACKENDS
    for case in CASES
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if not (name == "flex" and dtype != torch.bfloat16) and not (name == "varlen" and "alibi" in case)
]
COMBINATIONS += [(name, case, torch.bfloat16) for name in ("flex", "flash") for case in CAPPED]
COMBINATIONS += [("flash", "causal capped", torch.float32)]  # by the formula


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(("name", "case", "dtype"), COMBINATIONS, ids=lambda value: str(value))
def test_formula_and_gradients(name: str, case: str, dtype: torch.dtype, kv_heads: int) -> None:
    compare(name, case, dtype, kv_heads, D)


@pytest.mark.parametrize("name", ["flex", "flash"])
def test_capped_scores_of_heads_as_wide_as_gemmas(name: str) -> None:
    compare(name, "documents window capped", torch.bfloat16, 4, 256)


def compare(name: str, case: str, dtype: torch.dtype, kv_heads: int, width: int) -> None:
    """The back-end against the formula in fp32."""
    task = {key: key in case for key in ("documents", "alibi", "window")}
    backend = usable(name, **task, softcap="capped" in case, head_dim=width)
    rules = rules_of(case, backend, dtype)
    given = [x.clone().requires_grad_() for x in inputs(kv_heads, dtype, width)]
    exact = [x.detach().float().requires_grad_() for x in given]
    direction = torch.randn(B, S, N, width, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    expected = ATTENTION_BACKENDS["manual"]().attend(*exact, Call(**rules))
    (expected * direction).sum().backward()
    out = backend.attend(*given, Call(**rules))
    assert out.dtype == dtype
    (out * direction.to(dtype)).sum().backward()
    close(out, expected, dtype, "output")
    for x, mine, reference in zip("qkv", given, exact, strict=True):
        close(mine.grad, reference.grad, dtype, f"gradient of {x}")


def close(mine: Tensor, reference: Tensor, dtype: torch.dtype, what: str) -> None:
    error = (mine.float() - reference).abs().max() / reference.abs().max()
    assert error < TOLERANCE[dtype], f"{what}: {error:.2e}"


def test_capped_scores_run_on_a_kernel_and_with_a_cache_by_the_formula() -> None:
    """One query of a cache that grows: no kernel is compiled for its length."""
    choice = choose_backend(Task(torch.device("cuda"), softcap=True))
    assert choice.name in ("flash", "flex")
    q, k, v = inputs(2, torch.bfloat16)
    call = Call(0.2, softcap=1.5)
    expected = ATTENTION_BACKENDS["manual"]().attend(q.float(), k.float(), v.float(), call)
    for length in (S - 1, S):
        last = choice.backend.attend(q[:, length - 1 : length], k[:, :length], v[:, :length], call)
        close(last, expected[:, length - 1 : length], torch.bfloat16, f"query {length}")


def test_varlen_refuses_alibi() -> None:
    with pytest.raises(UserError, match="ALiBi"):
        usable("varlen", alibi=True)


@pytest.mark.parametrize("name", BACKENDS)
def test_other_documents_change_nothing_at_all(name: str) -> None:
    backend = usable(name, documents=True)
    rules = rules_of("documents", backend, torch.bfloat16)
    q, k, v = inputs(2, torch.bfloat16)
    before = backend(q, k, v, **rules)
    k, v = k.clone(), v.clone()
    k[0, :130] *= 50
    v[0, 5:130] += 1000
    after = backend(q, k, v, **rules)
    assert torch.equal(before[0, 130:], after[0, 130:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, 5:130], after[0, 5:130])


def test_cudnn_is_what_runs() -> None:
    """The name promises a kernel; torch would quietly take another one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        usable("cudnn")(*inputs(2, torch.bfloat16), causal=True, scale=0.2)
    assert "aten::_scaled_dot_product_cudnn_attention" in {event.key for event in profile.key_averages()}


def test_the_default_keeps_a_fused_kernel() -> None:
    for kv_heads in (8, 2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            usable("torch")(*inputs(kv_heads, torch.bfloat16), causal=True, scale=0.2)
        names = {event.key for event in profile.key_averages()}
        assert names & {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_cudnn_attention"}
