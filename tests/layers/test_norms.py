"""Norms against their formulas in fp64, and the faults users report."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from megatron.errors import UserError
from megatron.layers.norms import (
    NORMS,
    build_norm,
    build_rms_norm,
)
from megatron.layers.norms.layernorm import LayerNorm
from megatron.layers.norms.rmsnorm import RMSNorm, UnitOffsetRMSNorm
from megatron.layers.norms.split import SplitRMSNorm
from megatron.mpu.state import ParallelState
from tests.model.networks import tiny

pytestmark = pytest.mark.cpu

STATE = ParallelState.single()


def _layernorm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "layernorm": lambda x, eps, weight, bias: _layernorm(x, eps) * weight + bias,
    "non_parametric_layernorm": lambda x, eps: _layernorm(x, eps),
    "rmsnorm": lambda x, eps, scale: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale,
    "rmsnorm_unit_offset": lambda x, eps, scale: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + scale),
    "scalenorm": lambda x, eps, g: g * x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=eps),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_formula_and_gradients(name: str, eps: float) -> None:
    norm = NORMS[name](32, eps=eps, state=STATE)
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(5, 32, generator=generator).mul_(0.1).requires_grad_()
    direction = torch.randn(5, 32, generator=generator)

    exact = [t.detach().double().requires_grad_() for t in (x, *norm.parameters())]
    expected = FORMULAS[name](exact[0], eps, *exact[1:])
    (expected * direction).sum().backward()
    out = norm(x)
    (out * direction).sum().backward()

    assert (out - expected).abs().max() < 1e-5
    for mine, reference in zip((x, *norm.parameters()), exact, strict=True):
        assert (mine.grad - reference.grad).abs().max() < 1e-5 * reference.grad.abs().max().clamp(min=1)


def test_rmsnorm_epsilon_is_inside_the_root() -> None:
    # 1e-3 / sqrt(1e-6 + 1e-5) = 0.30151; outside the root it would be 1e-3 / (1e-3 + 1e-5) = 0.99010.
    out = RMSNorm(8, eps=1e-5, state=STATE)
    out.scale.data.fill_(1.0)
    assert out(torch.full((1, 8), 1e-3)).tolist()[0] == pytest.approx([0.30151] * 8, abs=1e-5)


@pytest.mark.parametrize(
    ("norm", "key"),
    [
        ("layernorm", "layernorm_epsilon"),
        ("rmsnorm", "rms_norm_epsilon"),
        ("rmsnorm_unit_offset", "rms_norm_epsilon"),
        ("scalenorm", "scalenorm_epsilon"),
    ],
)
def test_each_norm_reads_its_own_epsilon_key(norm: str, key: str) -> None:
    assert build_norm(tiny(norm=norm, **{key: 0.125}), STATE).eps == 0.125


def test_initial_weights_and_names() -> None:
    names = {name: [p for p, _ in NORMS[name](4, eps=0.0, state=STATE).named_parameters()] for name in NORMS}
    expected = {
        "layernorm": ["weight", "bias"],
        "non_parametric_layernorm": [],
        "rmsnorm": ["scale"],
        "rmsnorm_unit_offset": ["scale"],
        "scalenorm": ["g"],
    }
    assert expected.items() <= names.items()
    norm = LayerNorm(4, eps=0.0, state=STATE)
    for parameter in norm.parameters():
        assert parameter.spec.kind == "vector"
        assert parameter.spec.decay is False
        assert parameter.spec.sequence_reduced


def test_a_half_precision_norm_keeps_its_dtype() -> None:
    for name in NORMS:
        norm = NORMS[name](16, eps=1e-5, state=STATE).bfloat16()
        assert norm(torch.randn(3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_unit_offset_is_added_in_fp32_as_gemma_does() -> None:
    """Bit for bit transformers' class in bf16: 1 + w there would lose what is below 2^-8 of w."""
    theirs = Gemma2RMSNorm(64, eps=1e-6).bfloat16()
    norm = NORMS["rmsnorm_unit_offset"](64, eps=1e-6, state=STATE).bfloat16()
    assert not norm.scale.any()  # starts at 0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.scale.normal_(std=0.01, generator=generator)
        theirs.weight.copy_(norm.scale)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    assert torch.equal(norm(x), theirs(x))


def test_norms_of_queries_and_keys_are_of_the_kind_of_the_others() -> None:
    kinds = {
        norm: type(build_rms_norm(tiny(norm=norm, rms_norm_epsilon=0.5), STATE, width=8))
        for norm in ("rmsnorm_unit_offset", "rmsnorm", "layernorm")
    }
    assert kinds == {"rmsnorm_unit_offset": UnitOffsetRMSNorm, "rmsnorm": RMSNorm, "layernorm": RMSNorm}


def test_split_rmsnorm_on_one_rank_is_rmsnorm() -> None:
    split, whole = SplitRMSNorm(12, eps=1e-3, state=STATE), RMSNorm(12, eps=1e-3, state=STATE)
    split.scale.data.normal_()
    whole.scale.data.copy_(split.scale.data)
    x = torch.randn(4, 12)
    assert (split(x) - whole(x)).abs().max() < 1e-6


def test_unknown_norm_names_the_choices() -> None:
    with pytest.raises(UserError, match="rmsnorm"):
        NORMS["rmsnrm"]
