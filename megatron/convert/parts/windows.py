"""Windows of layers ↔ `layer_types` and `sliding_window` of Hugging Face's configs.

Their window counts the query itself, ours the tokens before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def window_fields(model: ModelConfig) -> dict[str, Any]:
    """The window, and which layers have it."""
    windows = model.layer_windows or (None,) * model.num_layers
    width = next((window for window in windows if window is not None), None)
    return {
        "sliding_window": None if width is None else width + 1,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }
