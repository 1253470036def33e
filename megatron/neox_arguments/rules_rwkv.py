"""Rules about RWKV layers."""

from __future__ import annotations

from megatron.neox_arguments.block_sizes import RWKV
from megatron.neox_arguments.draft import Draft, nearest_multiples


def widths(draft: Draft) -> None:
    """Widths of time and channel mixing; tensor-parallel ranks must divide them."""
    draft.positive("dim_att", "ffn_dim")
    if not set(RWKV) & set(draft["attention_config"]):
        return
    draft.set("dim_att", draft.given("dim_att") or draft["hidden_size"], "hidden_size")
    draft.set("ffn_dim", draft.given("ffn_dim") or 4 * draft["hidden_size"], "4 x hidden_size")
    if draft["use_mup"]:
        draft.fail("use_mup", "muP has no rule for RWKV layers; set it to false")
    tensor = draft["model_parallel_size"]
    for name in ("dim_att", "ffn_dim"):
        if draft[name] % tensor:
            near = nearest_multiples(draft[name], tensor)
            draft.fail(name, f"{draft[name]} cannot be split over {tensor} tensor-parallel ranks; nearest {near}")
