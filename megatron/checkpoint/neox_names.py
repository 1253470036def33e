"""Names of a layer's parameters in GPT-NeoX's files: those of today, those before, and Transformer Engine's.

    today                        before (20B, Pythia)   before (LLaMA)   Transformer Engine
    attention.query_key_value.*                                          attention.qkv.*
    attention.dense.*                                                    attention.proj.*
    mlp.linear1.*                mlp.dense_h_to_4h.*    mlp.w3, mlp.w1   mlp.fc1_weight, mlp.fc1_bias
    mlp.linear2.*                mlp.dense_4h_to_h.*    mlp.w2           mlp.fc2_weight, mlp.fc2_bias
    post_attention_layernorm.*                                           mlp.layer_norm_weight, mlp.layer_norm_bias

`w1` is the gate and `w3` goes up, so both together are linear1 = [up ; gate]. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_RENAMED = (
    (r"norm\.norm\.", "norm."),  # te_layernorm, te_rmsnorm
    (r"^attention\.qkv\.", "attention.query_key_value."),
    (r"^attention\.proj\.", "attention.dense."),
    (r"^mlp\.(?:dense_h_to_4h\.|fc1_)", "mlp.linear1."),
    (r"^mlp\.(?:dense_4h_to_h\.|fc2_|w2\.)", "mlp.linear2."),
    (r"^mlp\.layer_norm_", "post_attention_layernorm."),
)
# What Transformer Engine keeps for itself, and tables that are computed.
_NO_PARAMETER = re.compile(r"(^|\.)_extra_state|(^|\.)inv_freq$|^attention\.rotary_emb\.|^attention\.(masked_)?bias$")
GPT_NEOX_EXPERTS = ("mlp.experts.mlp.", "mlp.router.layer.")
TRANSFORMER_ENGINE_MLP = "mlp.fc1_weight"
# Biases of row-parallel projections.
ROW_BIASES = ("attention.dense.bias", "mlp.linear2.bias")

# Biases that GPT-NeoX's gMLP blocks own without adding them.
_ADDED_BY_NOBODY = ("input_linear.bias", "output_linear.bias")
# The one table of relative positions: ours in the embedding, in GPT-NeoX's files in every block.
SHARED_POSITIONS, POSITIONS_OF_BLOCKS = "shared_positions.weight", "attention.rpe.weight"

# Which names a checkpoint's files have; the reader knows both.
NEOX, TRANSFORMER_ENGINE = "neox", "transformer_engine"
_TRANSFORMER_ENGINE = (
    ("attention.query_key_value.", "attention.qkv."),
    ("attention.dense.", "attention.proj."),
    ("mlp.linear1.", "mlp.fc1_"),
    ("mlp.linear2.", "mlp.fc2_"),
    ("post_attention_layernorm.", "mlp.layer_norm_"),
)


def stored_name(local: str, names: str) -> str:
    """The name of a layer's parameter in files of these `names`: `mlp.linear1.weight` -> `mlp.fc1_weight`."""
    if names == TRANSFORMER_ENGINE:
        for today, theirs in _TRANSFORMER_ENGINE:
            if local.startswith(today):
                return theirs + local.removeprefix(today)
    return local


def sources(stored: Collection[str], wanted: Collection[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Where the parameters of one layer are.

    Args:
        stored: names in the layer's file.
        wanted: our names of the layer's parameters.

    Returns ({our name: the stored tensors to join along rows}, stored names that have no place in the model).
    """
    found: dict[str, tuple[str, ...]] = {}
    left_over = []
    for name in stored:
        if not is_parameter(name) or _is_unused(name, wanted):
            continue
        ours = _today(name, wanted)
        if gate := re.match(r"^mlp\.w1\.(\w+)$", name):
            ours, name = f"mlp.linear1.{gate[1]}", f"mlp.w3.{gate[1]}"
            both = (name, f"mlp.w1.{gate[1]}")
            if name in stored and ours in wanted:
                found[ours] = both
            else:
                left_over.append(both[1])
        elif name.startswith("mlp.w3.") and name.replace("w3", "w1") in stored:
            continue  # taken together with w1
        elif ours in wanted and ours not in found:
            found[ours] = (name,)
        else:
            left_over.append(name)
    return found, left_over


def is_parameter(name: str) -> bool:
    """Whether a stored name of a layer is one of a parameter."""
    return _NO_PARAMETER.search(name) is None


def decays(name: str) -> bool:
    """Whether GPT-NeoX's optimizer has a stored parameter in the group with weight decay."""
    *modules, last = name.split(".")
    return last not in ("bias", "A_log", "D") and not (modules and modules[-1].endswith("norm"))


def _today(name: str, wanted: Collection[str]) -> str:
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    scale = re.sub(r"norm\.weight$", "norm.scale", name)
    return scale if name not in wanted and scale in wanted else name


def _is_unused(name: str, wanted: Collection[str]) -> bool:
    """Norms that GPT-NeoX's blocks own without using: the second of gpt_j_tied, the first of OLMo's; tied copies."""
    if name in _ADDED_BY_NOBODY:
        return True
    norms = {ours.split(".")[0] for ours in wanted}
    if name.startswith(("post_attention_layernorm.", "mlp.layer_norm_")):
        return "input_layernorm" in norms and "post_attention_layernorm" not in norms
    only_behind = "post_feedforward_layernorm" in norms and "input_layernorm" not in norms
    return name.startswith("input_layernorm.") and only_behind
