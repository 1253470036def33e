"""The width of the feed-forward in a checkpoint: it decides what a config's `intermediate_size` means.

Imports no torch, unless GPT-NeoX wrote the checkpoint: its files alone have the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.neox_folder import NeoXFiles
from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.rules_feed_forward import readings
from megatron.neox_arguments.schema_model import ModelConfig

_OURS = re.compile(r"^\d+\.mlp\.linear2\.weight$")
_THEIRS = re.compile(r"(^|\.)mlp\.(linear2\.|dense_4h_to_h\.|w2\.|fc2_)weight$")


def stored_width(checkpoint: Checkpoint) -> int | None:
    """The width of the first dense feed-forward, over all tensor-parallel ranks; None when there is none."""
    if checkpoint.by_neox:
        return next(_neox_widths(NeoXFiles.of(checkpoint.path)), None)
    shapes = (entry.shape for name, entry in checkpoint.manifest.parameters.items() if _OURS.match(name))
    return next((shape[1] for shape in shapes), None)


def _neox_widths(files: NeoXFiles) -> Iterator[int]:
    from megatron.checkpoint.foreign import load_foreign

    names = sorted(files.name(layer, 0) for layer, rank in files.layers if rank == 0) or [layout.state_file(0)]
    for name in names:
        content: Mapping[str, Any] = load_foreign(files.folder / name)
        while isinstance(content.get("module"), Mapping):
            content = content["module"]
        yield from (value.shape[1] * files.tp_size for key, value in content.items() if _THEIRS.search(str(key)))


def advise_width(model: ModelConfig, local: str, shape: list[int], tp_size: int) -> str:
    """What to set so that a parameter of the feed-forward has the `shape` that each rank has; "" for other parameters.

    `local`: its name inside the layer.
    """
    if local not in ("mlp.linear1.weight", "mlp.linear2.weight") or len(shape) != 2:
        return ""
    gated = is_gated(model.activation)
    width = shape[1] * tp_size if local == "mlp.linear2.weight" else shape[0] * tp_size // (2 if gated else 1)
    both = readings(vars(model))
    if model.te_layernorm_mlp:
        cure = f"intermediate_size: {width}"  # it is the width built, whatever else is set
    elif both is not None and width in both:
        cure = f"gated_width_rule: {both._fields[both.index(width)]}"
    else:
        cure = f"intermediate_size: {width}" + (" with gated_width_rule: final" if gated else "")
    return f". The feed-forward is {width} wide there and {model.ffn_width} in the config: set {cure}"
