"""Rules about caps, factors and biases: keys that change the numbers a network computes, but not its shape."""

from __future__ import annotations

from megatron.neox_arguments.block_sizes import ATTENTION
from megatron.neox_arguments.draft import Draft

# Back-ends of attention whose kernels return no scores that a cap could be put on.
WITHOUT_SOFTCAP = ("torch", "cudnn", "varlen", "transformer_engine")


def soft_caps(draft: Draft) -> None:
    """Caps and the query's scale are positive, and a back-end that is asked for can do them."""
    draft.positive("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    draft.not_negative("z_loss_weight")
    backend = draft["attention_backend"]
    if draft["attn_logit_softcapping"] is not None and backend in WITHOUT_SOFTCAP:
        draft.report("attention_backend", f"{backend} cannot cap scores (attn_logit_softcapping); use auto")
    if draft["query_pre_attn_scalar"] is not None and draft["use_mup"]:
        draft.fail("query_pre_attn_scalar", "muP scales queries by 1 / head_dim; leave it out or set use_mup: false")


def embedding(draft: Draft) -> None:
    """What happens to word embeddings before the first block."""
    draft.check(lambda value: 0 <= value < 1, "must be in [0, 1)", "embedding_dropout")
    if draft["scale_embedding"] and draft["use_mup"]:
        draft.fail("scale_embedding", "it grows with the width, which muP forbids; set mup_embedding_mult instead")


def local_positions(draft: Draft) -> None:
    """rotary_emb_base_local needs rotary positions and a layer that has a window."""
    draft.positive("rotary_emb_base_local")
    if draft["rotary_emb_base_local"] is None:
        return
    if draft["pos_emb"] != "rotary":
        draft.fail("rotary_emb_base_local", f"pos_emb is {draft['pos_emb']}; it needs rotary")
    if all(window is None for window in draft["layer_windows"]):
        draft.fail("rotary_emb_base_local", "no layer has a sliding window; set sliding_window_width or leave it out")


def value_embeddings(draft: Draft) -> None:
    """value_embedding_interval falls on layers of attention."""
    draft.not_negative("value_embedding_interval")
    if (every := draft["value_embedding_interval"]) <= 0:
        return
    kinds = {kind for kind in draft["attention_config"][::-1][::every] if kind not in ATTENTION}
    if kinds:
        draft.fail(
            "value_embedding_interval",
            f"{every} takes in layers of kind {', '.join(sorted(kinds))}, which have no values; leave it out",
        )


def head_bias(draft: Draft) -> None:
    """A bias of the output head goes with a matrix of its own."""
    if draft["use_bias_in_head"] and not draft["no_weight_tying"]:
        draft.fail("use_bias_in_head", "a head that shares the word embeddings has no bias; set no_weight_tying: true")


def unit_offset(draft: Draft) -> None:
    """Norms over all heads together exist with weights around 1 only."""
    separate = draft["use_separate_qk_norms"] and not draft["qk_norm_per_head"]
    if draft["norm"] == "rmsnorm_unit_offset" and separate:
        draft.fail("use_separate_qk_norms", "norm: rmsnorm_unit_offset needs qk_norm_per_head: true")
