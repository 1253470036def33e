"""Rules about Mamba layers."""

from __future__ import annotations

from megatron.neox_arguments.block_sizes import MAMBA
from megatron.neox_arguments.draft import Draft, nearest_multiples

_STATE = {"mamba": 16, "mamba2": 128}


def widths(draft: Draft) -> None:
    """State, rank and heads of Mamba layers; the inner width must divide over heads and tensor-parallel ranks."""
    draft.positive("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank", "mamba_head_dim",
        "mamba_n_groups", "mamba_chunk_size", "mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor",
    )  # fmt: skip
    if draft["mamba_dt_min"] > draft["mamba_dt_max"]:
        draft.fail("mamba_dt_min", f"{draft['mamba_dt_min']} is above mamba_dt_max {draft['mamba_dt_max']}")
    kinds = [kind for kind in MAMBA if kind in draft["attention_config"]]
    if not kinds:
        return
    if len(kinds) == 2 and draft.get_given("mamba_d_state") is None:
        draft.fail("mamba_d_state", "must be set when there are both mamba and mamba2 layers")
    draft.set("mamba_d_state", draft.get_given("mamba_d_state") or _STATE[kinds[0]], f"{kinds[0]} layers")
    rank = -(-draft["hidden_size"] // 16)
    draft.set("mamba_dt_rank", draft.get_given("mamba_dt_rank") or rank, "hidden_size / 16, rounded up")
    if draft["use_mup"]:
        draft.fail("use_mup", "muP has no rule for Mamba layers; set it to false")
    if draft["mamba_inner_func_fusion"] and draft["mamba_use_bias_in_linears"]:
        draft.fail("mamba_inner_func_fusion", "the kernel has no biases; set mamba_use_bias_in_linears: false")
    inner, tensor = draft["mamba_expand"] * draft["hidden_size"], draft["model_parallel_size"]
    if inner % tensor:
        draft.fail(
            "model_parallel_size", f"the inner width {inner} of Mamba layers cannot be split over {tensor} ranks"
        )
    if "mamba2" in kinds:
        _heads(draft, inner, tensor)


def _heads(draft: Draft, inner: int, tensor: int) -> None:
    width, groups = draft["mamba_head_dim"], draft["mamba_n_groups"]
    if inner % width:
        near = nearest_multiples(inner, width)
        draft.fail("mamba_head_dim", f"{width} does not divide mamba_expand x hidden_size = {inner}; nearest {near}")
    heads = inner // width
    if heads % groups:
        draft.fail("mamba_n_groups", f"{groups} does not divide the {heads} heads of mamba2 layers")
    for what, count in (("heads", heads), ("rows of B", groups * draft["mamba_d_state"])):
        if count % tensor:
            draft.fail("model_parallel_size", f"{count} {what} of mamba2 layers cannot be split over {tensor} ranks")
