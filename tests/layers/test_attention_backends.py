"""Every back-end against the formula in fp64, forward and gradients, over all combinations of its arguments."""

from __future__ import annotations

import math
import re
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _fa3

from megatron.errors import UserError
from megatron.layers import attention_kernels, attention_packed
from megatron.layers.attention_backends import choose_backend
from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Call, Task
from megatron.layers.attention_masks import visible_mask
from megatron.layers.documents import Documents, document_bounds
from megatron.layers.positions.alibi import alibi_slopes
from megatron.neox_arguments.rules_scales import WITHOUT_SOFTCAP

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
B, S, N, D = 2, 7, 4, 8


def _reference(q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Tensor:
    """Softmax attention one query at a time, in fp64, keys picked by plain conditions."""
    b, s, n, _ = q.shape
    s_k, group = k.shape[1], n // k.shape[2]
    out = torch.zeros_like(q)
    for row in range(b):
        for head in range(n):
            for i in range(s):
                column = s_k - s + i
                keys = [j for j in range(s_k) if _visible(rules, row, column, j)]
                score = k[row, keys, head // group] @ q[row, i, head] * rules["scale"]
                if rules.get("softcap") is not None:
                    score = rules["softcap"] * torch.tanh(score / rules["softcap"])
                if rules.get("slopes") is not None:
                    score = score - rules["slopes"][head] * torch.tensor([column - j for j in keys])
                out[row, i, head] = score.softmax(0) @ v[row, keys, head // group]
    return out


def _visible(rules: dict[str, Any], row: int, i: int, j: int) -> bool:
    if i == j:
        return True
    seen = j <= i or not rules["causal"]
    if rules.get("window") is not None:
        seen &= abs(i - j) <= rules["window"]
    if rules.get("documents") is not None:
        ids = rules["documents"].ids
        seen &= bool(ids[row, i] == ids[row, j])
    if rules.get("key_start") is not None:
        seen &= j >= int(rules["key_start"][row])
    return seen


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 4, 5, 5, 5, 6, 6]])
NUMBERS = Documents(IDS)
READY = Documents(IDS).prepare({(form, w) for form in ("bounds", "mask", "blocks") for w in (None, 1, 3)})
RULES: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window": 2},
    {"causal": True, "window": 0},
    {"causal": True, "window": 100},
    {"causal": False, "window": 1},
    {"causal": True, "documents": NUMBERS},
    {"causal": True, "documents": READY},
    {"causal": True, "documents": READY, "window": 1},
    {"causal": True, "slopes": torch.tensor(alibi_slopes(N))},
    {"causal": True, "slopes": torch.tensor(alibi_slopes(N)), "documents": READY, "window": 3},
    {"causal": True, "key_start": torch.tensor([0, 3])},
]

CAPPED: list[dict[str, Any]] = [{**rules, "softcap": 0.7} for rules in RULES]


def _inputs(kv_heads: int, s_k: int = S) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Cut from one fused tensor, as the layer does: strided views, not contiguous.
    fused = torch.randn(B, s_k, N + 2 * kv_heads, D, generator=generator)
    q, k, v = fused.split((N, kv_heads, kv_heads), dim=2)
    return q[:, s_k - S :], k, v


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("backend", "rules"),
    [(backend, rules) for backend in ("torch", "varlen", "manual") for rules in RULES]
    + [("manual", rules) for rules in CAPPED],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_formula_and_gradients(backend: str, kv_heads: int, rules: dict[str, Any]) -> None:
    rules = {**rules, "scale": 0.3}
    inputs = [x.clone().requires_grad_() for x in _inputs(kv_heads)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    direction = torch.randn(B, S, N, D, generator=torch.Generator().manual_seed(1))
    expected = _reference(*exact, rules)
    (expected * direction).sum().backward()
    out = ATTENTION_BACKENDS[backend]().attend(*inputs, Call(**rules))
    (out * direction).sum().backward()
    assert (out - expected).abs().max() < 1e-5
    for mine, reference in zip(inputs, exact, strict=True):
        assert (mine.grad - reference.grad).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "rules",
    [*(RULES[i] for i in (1, 6, 8, 10, 11)), *(CAPPED[i] for i in (0, 8, 10, 11))],
    ids=lambda rules: "+".join(rules),
)
def test_flex(rules: dict[str, Any]) -> None:
    """Forward only: on a CPU torch has no backward for FlexAttention, and we say so."""
    rules = {**rules, "scale": 0.3}
    q, k, v = _inputs(2)
    attend = ATTENTION_BACKENDS["flex"]().attend
    assert (attend(q, k, v, Call(**rules)) - _reference(q.double(), k.double(), v.double(), rules)).abs().max() < 1e-5
    if "softcap" in rules and "key_start" in rules:
        return  # by the formula
    with pytest.raises(UserError, match="cannot train on a CPU"):
        attend(q.clone().requires_grad_(), k, v, Call(**rules))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["torch", "varlen", "manual", "flex"])
@pytest.mark.parametrize("rules", [{}, {"window": 2}, {"key_start": torch.tensor([1, 4])}], ids=str)
def test_fewer_queries_than_keys_are_the_last_ones(backend: str, rules: dict[str, Any]) -> None:
    q, k, v = _inputs(2, s_k=S + 5)
    rules = {"causal": True, "scale": 0.5, "slopes": torch.tensor(alibi_slopes(N)), **rules}
    loaded = ATTENTION_BACKENDS[backend]()
    for cap in ({}, {"softcap": 0.7}) if loaded.softcap else ({},):
        out = loaded.attend(q, k, v, Call(**rules, **cap))
        assert (out - _reference(q.double(), k.double(), v.double(), {**rules, **cap})).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["torch", "varlen", "manual", "flex"])
@pytest.mark.parametrize("documents", [NUMBERS, READY], ids=["numbers", "ready"])
def test_other_documents_change_nothing_at_all(backend: str, documents: Documents) -> None:
    attend = ATTENTION_BACKENDS[backend]().attend
    q, k, v = _inputs(2)
    before = attend(q, k, v, Call(0.3, documents=documents))
    k, v = k.clone(), v.clone()
    k[0, :3] *= 50  # all of row 0's first document
    v[0, :3] += 1000
    after = attend(q, k, v, Call(0.3, documents=documents))
    assert torch.equal(before[0, 3:], after[0, 3:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :3], after[0, :3])


def test_a_window_of_w_sees_w_before_and_itself() -> None:
    seen = visible_mask(6, 6, CPU, window=2)[0, 0]
    assert seen.sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert seen[5].tolist() == [False, False, False, True, True, True]


def test_wholly_padded_queries_give_no_nan() -> None:
    q, k, v = _inputs(2)
    for backend in ("torch", "manual"):
        out = ATTENTION_BACKENDS[backend]().attend(q, k, v, Call(0.3, key_start=torch.tensor([5, 7])))
        assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["torch", "manual"])
def test_dropout(backend: str) -> None:
    """Weights are dropped and the rest grows by 1 / (1 - p): the mean over many draws is the plain result."""
    attend = ATTENTION_BACKENDS[backend]().attend
    q, k, v = _inputs(2)
    torch.manual_seed(0)
    many = torch.stack([attend(q, k, v, Call(0.3, dropout=0.5)) for _ in range(600)])
    plain = attend(q, k, v, Call(0.3))
    assert many.std(0)[:, 1:].min() > 0.01
    error = (many.mean(0) - plain).abs() / (many.std(0) / math.sqrt(600) + 1e-6)
    assert error.max() < 6


def test_scores_are_taken_in_fp32_for_half_inputs() -> None:
    q, k, v = (x.bfloat16() for x in _inputs(2))
    exact = _reference(q.double(), k.double(), v.double(), {"causal": True, "scale": 4.0})
    for backend in ("torch", "manual"):
        out = ATTENTION_BACKENDS[backend]().attend(q, k, v, Call(4.0))
        assert out.dtype == torch.bfloat16
        # Half an ulp of the result (2^-9 relative), plus that of the probabilities a fused kernel rounds.
        assert (out - exact).abs().max() < 2**-7 * exact.abs().max()


def test_sdpa_keeps_the_fused_kernel() -> None:
    """No back-end degradation: plain causal attention, grouped heads included, runs on the CPU's flash kernel."""
    for kv_heads in (4, 2):
        for rules in ({}, {"documents": READY}, {"window": 2}):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                ATTENTION_BACKENDS["torch"]().attend(*_inputs(kv_heads), Call(0.3, **rules))
            names = {event.key for event in profile.key_averages()}
            assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names


GPU = torch.device("cuda")


def test_choice_of_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert str(choose_backend(Task(CPU))) == "torch"
    assert str(choose_backend(Task(CPU, "flash"))) == "torch (flash-attn needs a GPU)"
    assert choose_backend(Task(CPU, documents=True)).name == "varlen"
    assert choose_backend(Task(CPU, documents=True, alibi=True)).name == "varlen"
    assert choose_backend(Task(CPU, documents=True, dropout=True)).name == "torch"
    assert choose_backend(Task(CPU), "manual").name == "manual"
    assert choose_backend(Task(GPU)).name == "torch"
    assert choose_backend(Task(CPU, window=True)).name == "torch"
    assert choose_backend(Task(GPU, window=True)).name == "varlen"
    assert choose_backend(Task(GPU, window=True, alibi=True)).name == "torch"
    without = choose_backend(Task(GPU, "flash"))  # flash-attn is not there
    assert without.name == "torch" and "requirements/requirements-flashattention.txt" in str(without)
    assert choose_backend(Task(GPU, "flash", documents=True)).name == "varlen"
    assert "no ALiBi" in str(choose_backend(Task(GPU, documents=True, alibi=True)))
    assert choose_backend(Task(GPU, documents=True, alibi=True)).name == "flex"
    assert choose_backend(Task(GPU, documents=True, dropout=True)).name == "torch"
    assert choose_backend(Task(GPU, documents=True, head_dim=20)).name == "flex"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert choose_backend(Task(GPU, documents=True)).name == "flex"


@pytest.mark.parametrize(
    ("installed", "capability", "works", "expected"),
    [
        (True, (9, 0), True, "varlen by FlashAttention 3"),
        (True, (9, 0), False, "varlen by FlashAttention 2"),  # the package has no kernels
        (False, (9, 0), True, "varlen by FlashAttention 2"),
        (True, (8, 0), True, "varlen by FlashAttention 2"),  # version 3 is for Hopper alone
    ],
)
def test_flash_attention_3_is_switched_on_where_it_is_installed(
    installed: bool, capability: tuple[int, int], works: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own switch and table, with a stand-in for the kernels."""
    registered: list[str] = []

    def register() -> types.SimpleNamespace:
        if not works:
            raise RuntimeError("does not expose FA3 kernels")
        registered.append("FA3")
        return types.SimpleNamespace(remove=lambda: None)

    torch.nn.attention.register_flash_attention_impl("FA3", register_fn=register)
    found = types.SimpleNamespace() if installed else None
    monkeypatch.setattr(attention_packed, "find_spec", lambda name: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    try:
        for task in (Task(GPU, documents=True), Task(GPU, window=True)):
            assert str(choose_backend(task)) == str(choose_backend(task, "varlen")) == expected
        assert choose_backend(Task(GPU)).kernel == choose_backend(Task(CPU, documents=True)).kernel == ""
        assert registered == ["FA3"] * expected.endswith("3")  # once for all layers
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
        torch.nn.attention.register_flash_attention_impl("FA3", register_fn=_fa3.register_flash_attention_fa3)


class _OnGpu(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("window", [None, 2])
def test_the_kernel_of_packed_documents_is_looked_up_when_a_layer_is_built(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a forward pass, which is compiled; there it gets the documents' borders and the window."""
    looked_up: list[None] = []

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, __: int, ___: int, *, scale: float, window_size: Any
    ) -> Tensor:
        assert window_size[1] == 0
        q, k, v, bounds = (x.as_subclass(Tensor) for x in (q, k, v, bounds))
        return attention_packed.packed_attention(q, k, v, bounds, scale, window_size[0], None)[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_kernels, "gpu_kernel", lambda: looked_up.append(None) or kernel)
    backend = ATTENTION_BACKENDS["varlen"]()
    assert len(looked_up) == 1
    inputs, rules = _inputs(2), {"causal": True, "scale": 0.3, "window": window, "documents": READY}
    out = backend.attend(*(x.as_subclass(_OnGpu) for x in inputs), Call(**rules))
    assert (out - _reference(*(x.double() for x in inputs), rules)).abs().max() < 1e-5 and len(looked_up) == 1


def test_capped_scores_go_where_they_can_be_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never silently dropped: a back-end that does not declare it is not taken, whatever its table entry says."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for options in ({}, {"documents": True}, {"window": True}, {"dropout": True}, {"alibi": True}):
        assert choose_backend(Task(CPU, softcap=True, **options)).name == "manual"
    assert str(choose_backend(Task(CPU, "flash", softcap=True))) == "manual (flash-attn needs a GPU)"
    without = choose_backend(Task(GPU, softcap=True))
    assert without.name == "flex" and "requirements/requirements-flashattention.txt" in str(without)
    assert choose_backend(Task(GPU, "flash", softcap=True, documents=True, window=True)).name == "flex"
    dropped = choose_backend(Task(GPU, softcap=True, dropout=True))
    assert dropped.name == "manual" and "FlexAttention" not in str(dropped)
    for name in ("torch", "varlen", "cudnn"):
        with pytest.raises(UserError, match=rf"attention_backend: {name} .*attn_logit_softcapping\); auto "):
            choose_backend(Task(GPU, softcap=True), name)
    monkeypatch.setattr("megatron.layers.attention_backends.CAPPED", {"cpu": ("foreign", "manual")})
    monkeypatch.setitem(ATTENTION_BACKENDS._entries, "foreign", lambda: Backend(lambda q, k, v, call: q))
    assert str(choose_backend(Task(CPU, softcap=True))).startswith("manual (it cannot cap scores")


def test_the_configuration_knows_which_back_ends_cannot_cap() -> None:
    loaded = {name: ATTENTION_BACKENDS[name]() for name in ATTENTION_BACKENDS if name != "flash"}
    assert {name for name, backend in loaded.items() if not backend.softcap} == set(WITHOUT_SOFTCAP)


def _flash_attn(monkeypatch: pytest.MonkeyPatch, version: str) -> list[dict[str, Any]]:
    """A stand-in for the package on a CPU: what its function was called with."""
    calls: list[dict[str, Any]] = []

    def function(q: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(options)
        return q

    functions = {"flash_attn_func": function, "flash_attn_varlen_func": function}
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(**functions, __version__=version))
    return calls


@pytest.mark.parametrize(
    ("version", "options", "reason"),
    [
        ("2.6.1", {}, r"from 2\.6\.2 on, not in 2\.6\.1"),
        ("2.6.2", {"dropout": True}, "dropout .*capped"),
        ("2.6.2.post1", {}, None),
        ("2.10.0", {"documents": True}, None),  # by flex, whose graph is the same for all lengths
    ],
)
def test_flash_attn_caps_from_the_version_that_can(
    monkeypatch: pytest.MonkeyPatch, version: str, options: dict[str, Any], reason: str | None
) -> None:
    calls = _flash_attn(monkeypatch, version)
    task = Task(GPU, softcap=True, **options)
    choice = choose_backend(task)
    if reason is not None:
        assert choice.name in ("flex", "manual") and re.search(reason, str(choice))
        return
    assert choice.name == ("flex" if options else "flash")
    if options:
        return
    assert choose_backend(Task(GPU, "flash")).name == "flash"
    q, k, v = (x.bfloat16() for x in _inputs(2))
    choice.backend.attend(q, k, v, Call(0.3, softcap=0.7))
    choice.backend.attend(q, k, v, Call(0.3))
    assert [call.get("softcap") for call in calls] == [0.7, None]


def test_flash_attn_is_asked_for_its_repeatable_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _flash_attn(monkeypatch, "2.8.3")
    q = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    flash = ATTENTION_BACKENDS["flash"]()
    for deterministic in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda value=deterministic: value)
        flash.attend(q, q, q, Call(causal=True, scale=1.0))
    assert [call.get("deterministic") for call in calls] == [None, True]


def test_flash_attn_leaves_what_it_cannot_do_to_the_capped_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _flash_attn(monkeypatch, "2.8.3")
    q, k, v = _inputs(2)
    rules = {"causal": True, "scale": 0.3, "softcap": 0.7, "key_start": torch.tensor([0, 3])}
    out = ATTENTION_BACKENDS["flash"]().attend(q, k, v, Call(**rules))
    assert (out - _reference(q.double(), k.double(), v.double(), rules)).abs().max() < 1e-5 and not calls


REFUSED = [
    (Task(CPU), "flash", r"requirements/requirements-flashattention\.txt"),
    (Task(CPU), "sdpa", "attention_backend"),
    (Task(CPU), "cudnn", "attention_backend: cudnn cannot be used: cuDNN needs a GPU; auto takes one that can"),
    (Task(CPU, dropout=True), "varlen", "attention_dropout is not 0"),
    (Task(GPU, documents=True, alibi=True), "varlen", "on a GPU varlen has no ALiBi"),
    (Task(GPU, dropout=True), "flex", "attention_dropout is not 0"),
]


@pytest.mark.parametrize(("task", "wanted", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_a_named_back_end_that_cannot_is_refused(
    task: Task, wanted: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=message):
        choose_backend(task, wanted)


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_no_dropout(backend: str) -> None:
    with pytest.raises(UserError, match="attention_dropout"):
        ATTENTION_BACKENDS[backend]().attend(*_inputs(2), Call(1.0, dropout=0.1, documents=READY))


def test_document_bounds() -> None:
    bounds, longest = document_bounds(IDS)
    assert bounds.tolist() == [0, 3, 7, 9, 12, 14]
    assert bounds.dtype == torch.int32
    assert longest == 4
    # Two rows that end and start with the same number are still two documents.
    assert document_bounds(torch.zeros(2, 3, dtype=torch.int64))[0].tolist() == [0, 3, 6]
