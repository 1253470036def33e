"""What a config leaves open about the width of its gated feed-forward, settled by a width that is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.rules_feed_forward import llama_width, readings


def is_open(args: NeoXArgs) -> bool:
    """Whether the config leaves open how wide its gated feed-forward is."""
    return bool(_meanings(args))


def _meanings(args: NeoXArgs) -> dict[int, dict[str, Any]]:
    """The widths that a config can mean, and the keys that would say so; empty when it says so itself."""
    values = args.values()
    if args.is_set("gated_width_rule") or values["te_layernorm_mlp"]:
        return {}
    if both := readings(values):
        return {width: {"gated_width_rule": rule} for rule, width in both._asdict().items()}
    unset = not (values["intermediate_size"] or values["expansion_factor"]) and is_gated(values["activation"])
    if not unset or not values["hidden_size"] or values["mlp_multiple_of"] < 1:
        return {}
    width = llama_width(values)
    return {width: {"intermediate_size": width, "gated_width_rule": "final"}}


def fit_width(args: NeoXArgs, width: int | None, where: str) -> NeoXArgs:
    """`args` with the keys that give `width`, when it is open and they can; `where`: who says so."""
    keys = _meanings(args).get(width or 0)
    if keys is None:
        return args
    said = ", ".join(f"{key}: {value}" for key, value in keys.items())
    note = f"{said}, because the feed-forward of {where} is {width} wide"
    return replace(args.replace(f"the shapes of {where}", **keys), notes=(*args.notes, note))
