"""Transformer Engine itself against the built-in layers: outputs and gradients in bf16, and a pass in FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from tests.model.networks import NEOX, VOCAB, build, tiny

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_kv_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
}
FORMS: list[dict[str, Any]] = [
    {**NEOX, "te_mha": True, "te_layernorm_mlp": True},
    {"te_mha": True, "te_layernorm_mlp": True, "norm": "te_layernorm", "layernorm_epsilon": 1e-3},
    {"te_layernorm_mlp": True, "norm": "te_rmsnorm", "activation": "relu2"},
    {"te_mha": True, "te_layernorm_mlp": True, "activation": "swiglu", "num_kv_heads": 2},
    {"te_columnparallel": True, "te_rowparallel": True, "use_bias_in_mlp": False},
    {"te_mha": True, "te_layernorm_mlp": True, "checkpoint_policy": "full"},
]


def _step(changes: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one pass in bf16."""
    network = build(tiny(**{**SIZES, **changes}), ParallelState.single("cuda")).bfloat16()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (2, 129), generator=generator).cuda()
    positions = torch.arange(128, device="cuda").expand(2, 128).contiguous()
    labels = (text[:, 1:].contiguous(), torch.ones(2, 128, device="cuda"), torch.tensor([1 / 256], device="cuda"))
    loss, _ = network((text[:, :-1].contiguous(), positions), labels)
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in named_parameters(network)}


@pytest.mark.parametrize("changes", FORMS)
def test_its_modules_compute_what_the_built_in_layers_compute(changes, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    loss, gradients = _step(changes)
    monkeypatch.setattr("megatron.layers.transformer_engine.DEVICES", ())
    wanted, expected = _step(changes)
    assert loss == pytest.approx(wanted, rel=5e-3)
    for name, gradient in gradients.items():
        error = torch.linalg.vector_norm(gradient - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert error < 5e-2, (name, error)


def test_a_pass_in_fp8_is_near_bf16() -> None:
    engine = pytest.importorskip("transformer_engine.pytorch")
    available, reason = engine.is_fp8_available(return_reason=True)
    if not available:
        pytest.skip(reason)
    keys = {**NEOX, "te_layernorm_mlp": True, "te_mha": True}
    wanted, _ = _step(keys)
    loss, gradients = _step({**keys, "te_fp8_mha": True})
    assert loss == pytest.approx(wanted, rel=5e-2) and loss != wanted
    assert all(gradient.isfinite().all() for gradient in gradients.values())
