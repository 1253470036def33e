"""A Mamba checkpoint → the folder that mamba-ssm's own `MambaLMHeadModel.from_pretrained` opens.

    <output>/config.json          the fields of mamba-ssm's MambaConfig
    <output>/pytorch_model.bin    the tensors: transformers' names, but for the embedding's

The format is one file, so the whole model is in memory while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.convert.drafts import draft_of, publish
from megatron.convert.families import FAMILIES
from megatron.convert.parts.family import WORD_EMBEDDINGS, Rule
from megatron.convert.settings import open_source
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

_EPSILON = 1e-5  # of every norm there; the config has no field for it


def export_mamba_ssm(checkpoint: str | Path, output: str | Path, config_files: Sequence[str] = ()) -> Path:
    """Convert a checkpoint of any layout. Returns the folder.

    Raises `UserError` when the model is not Mamba from first to last, or the folder exists.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"--output_dir: {output} exists; choose another folder")
    reader, settings = open_source(checkpoint, config_files)
    model = settings.model
    kind = (model.attention_config or ("",))[0]
    if kind not in ("mamba", "mamba2"):
        raise UserError(f"{reader.folder} has layers of {kind}; mamba-ssm has Mamba only")
    reasons = FAMILIES[kind].refusals(model)
    if model.rms_norm_epsilon != _EPSILON:
        reasons.append(f"rms_norm_epsilon: {model.rms_norm_epsilon} (it has {_EPSILON})")
    if reasons:
        raise UserError(f"mamba-ssm cannot express this model: {'; '.join(reasons)}")
    state = {}
    for rule in FAMILIES[kind].table(model):
        assert isinstance(rule, Rule)  # these tables have nothing else, and copy
        state[rule.theirs[0].replace("backbone.embeddings.", "backbone.embedding.")] = reader.weight(rule.ours)
    state.setdefault("lm_head.weight", state["backbone.embedding.weight"])
    with draft_of(output, "--output_dir") as draft:
        config = _config(model, kind, reader.entry(WORD_EMBEDDINGS).shape[0])
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        torch.save(state, draft / "pytorch_model.bin")
        publish(draft, output)
    return output


def _config(model: ModelConfig, kind: str, vocab_size: int) -> dict[str, Any]:
    widths = {"d_state": model.mamba_d_state, "d_conv": model.mamba_d_conv, "expand": model.mamba_expand}
    biases = {"bias": model.mamba_use_bias_in_linears, "conv_bias": model.mamba_use_bias_in_conv}
    if kind == "mamba":
        own: dict[str, Any] = {"layer": "Mamba1", "dt_rank": model.mamba_dt_rank}
    else:
        groups = {"headdim": model.mamba_head_dim, "ngroups": model.mamba_n_groups}
        own = {"layer": "Mamba2", **groups, "chunk_size": model.mamba_chunk_size}
    return {
        "d_model": model.hidden_size,
        "d_intermediate": 0,
        "n_layer": model.num_layers,
        "vocab_size": vocab_size,
        "ssm_cfg": {**own, **widths, **biases},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": not model.no_weight_tying,
    }
