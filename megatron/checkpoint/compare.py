"""What changed in the configuration since a checkpoint, and whether the run may be resumed with it.

Architecture, tokenizer and optimizer decide what the saved numbers mean; changing them is refused unless
`allow_config_changes: true`. The order of the data cannot change within a run. Everything else (learning rate, batch
size, layout, ...) may change and is logged. Sources and their weights may change for the steps to come: the record of
the data order in the checkpoint (data/order/saved_order) has the past, and knows the data by content, wherever it is
stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.init_from import DEPTH, NEW_REWARD_MODEL, OF_EACH_BLOCK, advise_new_run, stretch
from megatron.errors import UserError

ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_width",
    "activation",
    "bias_gelu_fusion",
    "use_bias_in_attn_linear",
    "use_bias_in_attn_output",
    "use_bias_in_mlp",
    "use_bias_in_head",
    "output_head",
    "final_logit_softcapping",
    "scale_embedding",
    "no_weight_tying",
    "norm",
    "norm_placement",
    "use_qk_layernorm",
    "use_separate_qk_norms",
    "qk_norm_per_head",
    "layernorm_epsilon",
    "rms_norm_epsilon",
    "scalenorm_epsilon",
    "mlp_norm_epsilon",
    "gpt_j_residual",
    "gpt_j_tied",
    "pos_emb",
    "opt_pos_emb_offset",
    "rotary_pct",
    "rotary_emb_base",
    "rotary_emb_base_local",
    "rope_scaling",
    "attention_config",
    "mlp_config",
    "plugin_options",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "sliding_window_width",
    "use_mup",
    "mup_width_mult",
    "mup_embedding_mult",
    "mup_rp_embedding_mult",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_dt_rank",
    "mamba_head_dim",
    "mamba_n_groups",
    "mamba_use_bias_in_conv",
    "mamba_use_bias_in_linears",
    "mamba_use_bias_in_x_proj",
    "dim_att",
    "head_size",
    "ffn_dim",
)
# Those of the architecture that change no parameter's shape: a model with another value can load the weights.
SHAPELESS = frozenset(
    (
        "bias_gelu_fusion",
        "final_logit_softcapping",
        "scale_embedding",
        "layernorm_epsilon",
        "rms_norm_epsilon",
        "scalenorm_epsilon",
        "mlp_norm_epsilon",
        "gpt_j_residual",
        "rotary_pct",
        "rotary_emb_base",
        "rotary_emb_base_local",
        "rope_scaling",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "sliding_window_width",
        "mup_embedding_mult",
        "mup_rp_embedding_mult",
    )
)
# What te_layernorm_mlp changes in a feed-forward that has the same parameters without it.
_OF_TE_LAYERNORM_MLP = ("bias_gelu_fusion", "mlp_norm_epsilon")
ADAPTERS = ("lora_r", "lora_alpha", "lora_target_modules", "use_rslora", "use_dora")
TOKENIZER = ("tokenizer_type", "tokenizer_fingerprint")
DATA_ORDER = (
    "seed",
    "seq_length",
    "split",
    "pack_impl",
)
OPTIMIZER = ("optimizer_type",)
# These are for this start only, so a difference means nothing.
_OF_THE_START = (
    "load",
    "s3_load",
    "iteration",
    "finetune",
    "init_from",
    "no_load_optim",
    "no_load_rng",
    "allow_config_changes",
    "override_lr_scheduler",
    "use_checkpoint_lr_scheduler",
    "git_hash",
    "save",
    "lora_base",
    *("do_train", "do_valid", "do_test"),  # derived from other keys
)
_LOGGED_ELSEWHERE = ("mixture", "plugins", "plugin_sources")  # the keys that it fills in; plugins.source_changes
_KINDS = {
    **dict.fromkeys(ARCHITECTURE, "architecture"),
    **dict.fromkeys(TOKENIZER, "tokenizer"),
    **dict.fromkeys(DATA_ORDER, "data order"),
    **dict.fromkeys(OPTIMIZER, "optimizer"),
}


@dataclass(frozen=True)
class Change:
    """A key whose value differs; `kind` is `architecture`, `tokenizer`, `data order`, `optimizer` or `other`."""

    key: str
    saved: Any
    current: Any
    kind: str

    def __str__(self) -> str:
        whence = " (from intermediate_size, gated_width_rule and mlp_multiple_of)" if self.key == "ffn_width" else ""
        return f"{self.key}: {self.saved!r} in the checkpoint, now {self.current!r}{whence}"


def compare_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[list[Change], list[Change]]:
    """(changes that would break the run, other changes) between two resolved flat configurations.

    A key that the older one does not have (it did not exist then) is no change.
    """
    breaking, others = [], []
    for key, now in current.items():
        if key not in saved or key in _OF_THE_START or key in _LOGGED_ELSEWHERE:
            continue
        before, now = _plain(saved[key]), _plain(now)
        if before != now:
            kind = _KINDS.get(key, "other")
            if key in ADAPTERS and saved.get("lora_r") is not None:
                kind = "architecture"  # of adapters that there are
            (others if kind == "other" else breaking).append(Change(key, before, now, kind))
    return breaking, others


def converted_to_engine(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """What a new run with te_layernorm_mlp computes in another way than the checkpoint, which was made without it.

    GPT-NeoX's fork trains Pythia, whose GELU is exact, in this way: a new run may, with a warning. Nothing else may.
    """
    if not current.get("te_layernorm_mlp") or saved.get("te_layernorm_mlp"):
        return []
    return [change for change in compare_configs(saved, current)[0] if change.key in _OF_TE_LAYERNORM_MLP]


def check_config(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    path: Path,
    trains: bool = True,
    allow: bool = False,
    finetune: bool = False,
    new_run: bool = False,
    load_optim: bool = True,
    load_data: bool = True,
    trained: bool = True,
) -> list[str]:
    """Messages for every change since the checkpoint; raises `UserError` when one would break the run.

    Args:
        path: the checkpoint's folder, which the error's advice names.
        trains: False for generation and evaluation, for which only the architecture must agree.
        allow: `allow_config_changes`: log it and continue; the order of the data cannot change all the same.
        finetune: a new run on old weights, for which only the architecture must agree.
        new_run: the run that made the checkpoint does not continue, so that what `converted_to_engine` finds is no
            matter, nor, without its optimizer state, a head of rewards that is new; the caller tells.
        load_optim: whether optimizer state is loaded, so that the optimizer must agree.
        load_data: whether the order of the samples is continued, so that its data keys must agree.
        trained: whether `saved` is the configuration of a run; else nothing has changed but what must agree.
    """
    breaking, others = compare_configs(saved, current)
    taken = converted_to_engine(saved, current) if new_run or finetune else []
    if new_run and not load_optim:
        taken += [change for change in breaking if change.key == "output_head" and change.current == "reward"]
    breaking = [change for change in breaking if change not in taken]
    weights_only = finetune or not trains
    matters = {"architecture"} if weights_only else {"architecture", "tokenizer"}
    if load_data and not weights_only:
        matters.add("data order")
    if load_optim and not weights_only:
        matters.add("optimizer")
    matter = [change for change in breaking if change.kind in matters]
    refused = [change for change in matter if not allow or change.kind == "data order"]
    if refused:
        lines = "\n".join(f"  {change.kind}: {change}" for change in refused)
        other = _other_way(refused, current, path) if trains else _use_own_config(path)
        raise UserError(
            "the configuration changed since the checkpoint in a way that breaks the run:\n"
            f"{lines}\nRestore these keys, or {other}."
        )
    harmless = [change for change in breaking if change.kind not in matters] + others if trained else []
    messages = [f"changed since the checkpoint (allow_config_changes): {change}" for change in matter]
    return messages + [f"changed since the checkpoint: {change}" for change in harmless]


def _use_own_config(path: Path) -> str:
    """For a model that is only used; a converted checkpoint has no YAML."""
    resolved = path / layout.CONFIGS / layout.RESOLVED
    where = resolved if resolved.is_file() else f"`config` in {path / layout.MANIFEST}"
    return f"use the checkpoint's own config ({where}) with load={path}"


def _other_way(refused: list[Change], current: Mapping[str, Any], path: Path) -> str:
    """What else the user may do, as it is typed."""
    kinds = {change.kind for change in refused}
    if [change.current for change in refused if change.key == "output_head"] == ["reward"]:
        return f"for {NEW_REWARD_MODEL}"
    if kinds == {"optimizer"} and not current.get("init_from"):
        return "set no_load_optim=true for a new optimizer"
    if (layer_map := _layer_map(refused)) is not None:
        parts = ["data: restart"] if "data order" in kinds else []
        return advise_new_run(path, [*parts, f"layer_map: {layer_map}", "optimizer: reset"], current.get("load"))
    if kinds <= {"data order", "optimizer"}:
        of_kind = {"data order": "data: restart", "optimizer": "optimizer: reset"}
        return advise_new_run(path, [of_kind[kind] for kind in sorted(kinds)], current.get("load"))
    if all(change.key in SHAPELESS or change.kind in ("tokenizer", "optimizer") for change in refused):
        same = ", if both tokenizers have the same number of tokens" if "tokenizer" in kinds else ""
        return f"set allow_config_changes=true to continue with this model{same}"
    without_load = ", load=null" if current.get("load") else ""
    return f"start a new run with new weights: another `save`{without_load}"


def _layer_map(refused: list[Change]) -> list[int] | None:
    """How the blocks of the checkpoint make the deeper model that is wanted, if the models differ in depth alone."""
    depth = next((change for change in refused if change.key == "num_layers"), None)
    others = {change.key for change in refused if change.kind in ("architecture", "tokenizer")} - set(DEPTH)
    if others or depth is None or depth.current < depth.saved:
        return None
    kinds = [(change.saved, change.current) for change in refused if change.key in OF_EACH_BLOCK]
    maps = (stretch(depth.saved, depth.current), [new % depth.saved for new in range(depth.current)])
    fitting = (
        one for one in maps if all([saved[old] for old in one] == list(now) for saved, now in kinds if saved and now)
    )
    return next(fitting, None)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
