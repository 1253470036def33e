"""Activations by our names and Hugging Face's: plain ones, and the function on the gate of gated ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.rows import rows

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

_NAMED = {name: row.values for name, row in rows("activation").items() if "hf" in row.values}
PLAIN = {name: values["hf"] for name, values in _NAMED.items() if not values.get("gated")}
GATED = {name: values["hf"] for name, values in _NAMED.items() if values.get("gated")}
# Theirs → ours; of plain ones with whether gelu is the tanh approximation (`bias_gelu_fusion`).
READ_PLAIN = {
    **{theirs: (ours, False) for ours, theirs in reversed(PLAIN.items())},
    "swish": ("silu", False),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), ("gelu", True)),
}
READ_GATED = {theirs: ours for ours, theirs in GATED.items()}


def plain_name(model: ModelConfig, tanh: str = "gelu_pytorch_tanh") -> str:
    """Theirs of a plain activation; `tanh`: what the architecture's files call gelu's tanh approximation."""
    theirs = "gelu_pytorch_tanh" if model.activation == "gelu" and model.bias_gelu_fusion else PLAIN[model.activation]
    return tanh if theirs == "gelu_pytorch_tanh" else theirs


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
