"""Rules about RWKV layers."""

from __future__ import annotations

from megatron.neox_arguments.block_sizes import RWKV
from megatron.neox_arguments.draft import Draft, nearest_multiples


def widths(draft: Draft) -> None:
    """Widths of time and channel mixing, and heads of RWKV-6; tensor-parallel ranks must divide them."""
    draft.positive("dim_att", "ffn_dim", "head_size")
    kinds = [kind for kind in RWKV if kind in draft["attention_config"]]
    if not kinds:
        return
    hidden, tensor = draft["hidden_size"], draft["model_parallel_size"]
    if len(kinds) == 2 and draft.get_given("ffn_dim") is None:
        draft.fail("ffn_dim", "must be set when there are both rwkv4 and rwkv layers")
    draft.set("dim_att", draft.get_given("dim_att") or hidden, "hidden_size")
    default = 4 * hidden if "rwkv4" in kinds else max(32, hidden * 7 // 2 // 32 * 32)
    draft.set("ffn_dim", draft.get_given("ffn_dim") or default, f"{kinds[0]} layers")
    if draft["use_mup"]:
        draft.fail("use_mup", "muP has no rule for RWKV layers; set it to false")
    for name in ("dim_att", "ffn_dim"):
        if draft[name] % tensor:
            near = nearest_multiples(draft[name], tensor)
            draft.fail(name, f"{draft[name]} cannot be split over {tensor} tensor-parallel ranks; nearest {near}")
    if "rwkv" in kinds:
        _heads(draft, tensor)


def _heads(draft: Draft, tensor: int) -> None:
    draft.set("head_size", draft.get_given("head_size") or 64, "rwkv layers")
    channels, width = draft["dim_att"], draft["head_size"]
    if channels % width:
        near = nearest_multiples(channels, width)
        draft.fail("head_size", f"{width} does not divide dim_att {channels}; nearest {near}")
    if channels // width % tensor:
        draft.fail(
            "model_parallel_size", f"{channels // width} heads of rwkv layers cannot be split over {tensor} ranks"
        )
