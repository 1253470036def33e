"""Rotary positions in Hugging Face's config.json (how they are read when all layers have the same: `Fields.rotary`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.parts.fields import Fields
from megatron.convert.parts.windows import FULL, SLIDING
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def rope_fields(model: ModelConfig, *, fraction: bool = False) -> dict[str, Any]:
    """`rope_parameters`, and next to it `rope_theta` and `rope_scaling` for transformers 4.

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


def layered_positions(fields: Fields, base: float, local: float) -> tuple[dict[str, Any], float | None]:
    """(our keys of layers without a window, base of those with one; None where both are the same).

    Reads `rope_parameters` (for all layers, or by kind of layer) and the older `rope_scaling`, which is of layers
    without a window. `base`, `local`: the bases where `rope_parameters` has none. Raises `UserError` where layers with
    a window are scaled in another way than the rest.
    """
    rope, scaling = dict(fields.take("rope_parameters", {})), fields.take("rope_scaling", None)
    by_kind = {kind: dict(rope.pop(kind) or {}) for kind in (FULL, SLIDING) if kind in rope}
    if by_kind and rope:
        raise UserError(f"{fields.where}: rope_parameters: {', '.join(sorted(rope))} next to {FULL} and {SLIDING}")
    full, sliding = (
        _read(fields, by_kind.get(kind, rope), theta, more)
        for kind, theta, more in ((FULL, base, scaling), (SLIDING, local, None))
    )
    if full == sliding:
        return full, None
    if "rope_scaling" in sliding or sliding["rotary_pct"] != full["rotary_pct"]:
        raise UserError(f"{fields.where}: rope_parameters: positions that differ between layers: {by_kind or rope}")
    return full, sliding["rotary_emb_base"]


def _read(fields: Fields, rope: dict[str, Any], base: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    length = fields.take("max_position_embeddings")
    given = {"rope_parameters": rope, "rope_theta": base, "rope_scaling": scaling, "max_position_embeddings": length}
    return Fields(given, fields.where).rotary("rope_theta")
