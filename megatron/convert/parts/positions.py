"""Rotary positions as Hugging Face's config.json writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def rope_fields(model: ModelConfig, *, fraction: bool = False) -> dict[str, Any]:
    """`rope_parameters`, and beside it `rope_theta` and `rope_scaling` for transformers 4.

    `fraction`: the architecture may rotate a part of each head, and wants to know which.
    """
    scaling, base = dict(model.rope_scaling or {}), float(model.rotary_emb_base)
    part = {"partial_rotary_factor": model.rotary_pct} if fraction else {}
    return {
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": base, **part},
        "rope_theta": base,
        **({"rope_scaling": scaling} if scaling else {}),
        **part,
    }
