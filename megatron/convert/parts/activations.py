"""Activations by the names of both sides, for all families: plain ones, and the function on the gate of gated ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

PLAIN = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "mish": "mish"}
GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_pytorch_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "linear",
}
# Theirs → ours; of plain ones with whether gelu is the tanh approximation (`bias_gelu_fusion`).
READ_PLAIN = {
    **{theirs: (theirs, False) for theirs in PLAIN.values()},
    "swish": ("silu", False),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), ("gelu", True)),
}
READ_GATED = {theirs: ours for ours, theirs in GATED.items()}


def plain_name(model: ModelConfig, tanh: str = "gelu_pytorch_tanh") -> str:
    """Theirs of a plain activation; `tanh`: what the architecture's files call gelu's tanh approximation."""
    return tanh if model.activation == "gelu" and model.bias_gelu_fusion else PLAIN[model.activation]


def plain_refusals(model: ModelConfig) -> list[str]:
    """For families without a gate."""
    if model.activation not in PLAIN:
        return [f"activation: {model.activation} (it has {', '.join(PLAIN)})"]
    return []


def gated_refusals(model: ModelConfig) -> list[str]:
    """For families with a gate."""
    if model.activation not in GATED:
        return [f"activation: {model.activation} (it has gated ones only: {', '.join(GATED)})"]
    return []
