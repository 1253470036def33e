"""What GPT-NeoX's Transformer Engine keys make of a model, whether Transformer Engine runs it or not.

GPT-NeoX builds a layer of Transformer Engine without asking some of its own keys, so that the same YAML is another
model than with its own layers. These rules write that model into the ordinary keys, which layers, exports and
checkpoints read.

| key                               | what it builds, whatever the YAML says                                          |
|-----------------------------------|---------------------------------------------------------------------------------|
| norm: te_layernorm, te_rmsnorm    | the norm of that name, with the YAML's epsilon                                  |
| te_layernorm_mlp                  | gelu in its tanh form; a norm of its own before the feed-forward (no gpt_j_tied)|
|                                   | with epsilon 1e-5 (layernorm) or 1e-8 (rmsnorm); biases; the width as given     |
| te_mha, te_fp8_mha                | biases in all projections; no norms of queries and keys                         |
| te_columnparallel, te_rowparallel | the same products                                                               |
"""

from __future__ import annotations

from typing import Any

from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.draft import Draft

NORMS = {"te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
EPSILONS = {"layernorm": 1e-5, "rmsnorm": 1e-8}
# The keys that it may write over.
FILLED = (
    *("norm", "te_norm", "te_mha", "activation", "bias_gelu_fusion", "gpt_j_tied", "mlp_multiple_of"),
    *("gated_width_rule", "mlp_norm_epsilon", "use_bias_in_mlp", "use_bias_in_attn_linear", "use_bias_in_attn_output"),
    *("use_qk_layernorm", "use_separate_qk_norms", "qk_norm_per_head"),
)
TANH = {"geglu": "geglu_tanh"}


def transformer_engine(draft: Draft) -> None:
    """The keys of the model that follow from the keys te_*; one note says which are not what the YAML says."""
    changes: list[str] = []

    def imply(name: str, value: Any, because: str) -> None:
        before = draft[name]
        if before == value:
            return
        if draft.is_set(name):
            changes.append(f"{name} {_yaml(value)} instead of {_yaml(before)} ({because})")
        else:
            changes.append(f"{name} {_yaml(value)} ({because})")
        draft.imply(name, value, because)

    if (norm := draft["norm"]) in NORMS:
        draft.imply("norm", NORMS[norm], "norm")
        draft.imply("te_norm", True, "norm")
    if draft["te_fp8_mha"]:
        draft.imply("te_mha", True, "te_fp8_mha")
    if draft["te_mha"]:
        for name in ("use_bias_in_attn_linear", "use_bias_in_attn_output"):
            imply(name, True, "te_mha")
        for name in ("use_qk_layernorm", "qk_norm_per_head", "use_separate_qk_norms"):
            imply(name, False, "te_mha")
    if draft["te_layernorm_mlp"]:
        if draft["activation"] == "gelu":
            imply("bias_gelu_fusion", True, "te_layernorm_mlp")
        elif draft["activation"] in TANH:
            imply("activation", TANH[draft["activation"]], "te_layernorm_mlp")
        imply("use_bias_in_mlp", True, "te_layernorm_mlp")
        imply("gpt_j_tied", False, "te_layernorm_mlp")
        imply("mlp_multiple_of", 1, "te_layernorm_mlp")
        _width(draft)
        _epsilon(draft, changes)
    if changes:
        draft.note(f"as GPT-NeoX builds it with Transformer Engine: {', '.join(changes)}")

    _check(draft)


def _check(draft: Draft) -> None:
    """Keys that would name something that is not there."""
    if draft["te_norm"] and draft["norm"] not in EPSILONS:
        draft.fail("te_norm", f"Transformer Engine has {' and '.join(EPSILONS)}, not norm: {draft['norm']}")
    epsilon = draft["mlp_norm_epsilon"]
    if epsilon is not None and epsilon < 0:
        draft.fail("mlp_norm_epsilon", f"must not be negative, is {epsilon}")
    if epsilon is not None and (draft["gpt_j_tied"] or draft["norm_placement"] == "olmo3"):
        key = "gpt_j_tied" if draft["gpt_j_tied"] else "norm_placement: olmo3"
        draft.fail("mlp_norm_epsilon", f"with {key} the feed-forward has no norm of its own before it; leave it out")


def _width(draft: Draft) -> None:
    """The width is built as given, which a gated_width_rule of the user's own may not deny."""
    if is_gated(draft["activation"]) and draft.get_given("gated_width_rule") == "two_thirds":
        draft.report(
            "gated_width_rule",
            f"two_thirds does not go with te_layernorm_mlp ({draft.source('te_layernorm_mlp')}), which builds "
            "intermediate_size as it is; leave it out and set intermediate_size to the width built",
        )
    else:
        draft.imply("gated_width_rule", "final", "te_layernorm_mlp")


def _epsilon(draft: Draft, changes: list[str]) -> None:
    """The epsilon before the feed-forward; said only where the other norms have another one."""
    norm, before = draft["norm"], draft["mlp_norm_epsilon"]
    epsilon = EPSILONS.get(norm)
    if epsilon is None or draft["norm_placement"] == "olmo3":
        return
    rest = draft["layernorm_epsilon" if norm == "layernorm" else "rms_norm_epsilon"]
    wanted = None if rest == epsilon else epsilon
    if before != wanted:
        changes.append(f"mlp_norm_epsilon {epsilon:g}, {rest:g} in the other norms (te_layernorm_mlp)")
        draft.imply("mlp_norm_epsilon", wanted, "te_layernorm_mlp")


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
