"""Windows of layers ↔ `sliding_window` and `layer_types` of Hugging Face's configs.

Their window counts the query itself, ours the tokens before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.parts.fields import Fields
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def single_window(model: ModelConfig) -> int | None:
    """Theirs of a model whose layers have the same one, or none."""
    window = model.layer_windows[0]
    return None if window is None else window + 1


def window_fields(model: ModelConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    windows = model.layer_windows or (None,) * model.num_layers
    width = next((window for window in windows if window is not None), None)
    return {
        "sliding_window": None if width is None else width + 1,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def window_keys(fields: Fields, window: int | None, types: list[str]) -> dict[str, Any]:
    """Our keys for a window in the layers of type sliding_attention."""
    layers = fields.take("num_hidden_layers")
    if len(types) != layers or set(types) - {SLIDING, FULL}:
        raise UserError(f"{fields.where}: layer_types: must be {layers} times {SLIDING} or {FULL}, is {types!r}")
    if SLIDING not in types:
        return {}
    if window is None or window < 2:
        raise UserError(f"{fields.where}: sliding_window: {window} cannot be expressed with layers of {SLIDING}")
    keys: dict[str, Any] = {"sliding_window_width": window - 1}
    if FULL in types:
        keys["attention_config"] = ["local" if kind == SLIDING else "global" for kind in types]
    return keys


def single_window_keys(fields: Fields, default: int | None) -> dict[str, Any]:
    """Our keys for the same window in every layer, `default` where the field is missing; null is none."""
    window = fields.take_or_null("sliding_window", default)
    if window is None:
        return {}
    if window < 2:
        raise UserError(f"{fields.where}: sliding_window: {window} lets no token see another and cannot be expressed")
    return {"sliding_window_width": window - 1}
