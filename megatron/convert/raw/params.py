"""params.json of LLaMA and Mistral ↔ our flat keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.convert.families import FAMILIES
from megatron.convert.parts.fields import Fields
from megatron.convert.raw.files import EMBEDDING, HEAD, PARAMS, RawFolder
from megatron.errors import UserError

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

# Llama 3.1 and later stretch their positions by numbers that are in their code rather than in params.json.
STRETCHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTORS = {"3.1": 8.0, "3.3": 8.0, "3.2": 32.0}
# (multiple_of, ffn_dim_multiplier) of the published sizes.
_WIDTHS = [(256, None), (4096, 1.3), (1024, 1.3), (256, 1.5), (256, 1.4)]


def keys_of(raw: RawFolder, model_size: str, longest: int | None) -> dict[str, Any]:
    """Our flat keys of the architecture, `vocab_size` included.

    Args:
        model_size: the name of the release, needed to distinguish Llama 3.1 from 3.2; may be empty.
        longest: `max_position_embeddings`; None takes what the release is known for.

    Raises `UserError` for fields that are not known here, since they might change the model.
    """
    where = str(raw.path / PARAMS)
    fields = Fields(raw.params, where)
    for name in ("multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size"):
        fields.take(name, None)
    hidden, heads = fields.take("dim"), fields.take("n_heads")
    missing = [name for name in (EMBEDDING, "layers.0.feed_forward.w1.weight") if name not in raw.tensors]
    if missing:
        raise UserError(f"{raw.path} does not hold {', '.join(missing)}: not the weights of a LLaMA or Mistral")
    width = raw.tensors["layers.0.feed_forward.w1.weight"].shape[0]
    if (given := fields.take("hidden_dim", width)) != width:
        raise UserError(f"{where}: hidden_dim: {given}, but w1 has {width} rows")
    window = fields.take("sliding_window", None)
    theta = float(fields.take("rope_theta", _theta(raw.params)))
    scaling = _scaling(fields, model_size)
    head_dim = fields.take("head_dim", hidden // heads)
    keys: dict[str, Any] = {
        "num_layers": fields.take("n_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **({"head_dim": head_dim} if head_dim * heads != hidden else {}),
        "num_kv_heads": fields.take("n_kv_heads", heads),
        "intermediate_size": width,
        "gated_width_rule": "final",
        "max_position_embeddings": longest or _longest(raw.params, scaling),
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(fields.take("norm_eps", 1e-5)),
        "activation": "swiglu",
        "no_weight_tying": not _is_tied(raw),
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "pos_emb": "rotary",
        "rotary_pct": 1.0,
        "rotary_emb_base": int(theta) if theta == int(theta) else theta,
        **({"rope_scaling": scaling} if scaling else {}),
        **({"sliding_window_width": window - 1} if window else {}),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.02,
        "vocab_size": raw.tensors[EMBEDDING].shape[0],
    }
    fields.finish()
    return keys


def _scaling(fields: Fields, model_size: str) -> dict[str, Any] | None:
    wanted = fields.take("use_scaled_rope", False)
    factor = fields.take("rope_scaling_factor", None)
    high = fields.take("rope_high_freq_factor", STRETCHED["high_freq_factor"])
    if not wanted:
        return None
    factor = factor or next((f for release, f in _FACTORS.items() if release in model_size), None)
    if factor is None:
        raise UserError(
            f"{fields.where}: use_scaled_rope has no factor, and releases differ; give --model_size with "
            f"the release in it ({', '.join(f'{name}: {f:g}' for name, f in _FACTORS.items())}), as in llama3.1-8B"
        )
    return {"rope_type": "llama3", "factor": float(factor), **STRETCHED, "high_freq_factor": float(high)}


def _longest(params: dict[str, Any], scaling: dict[str, Any] | None) -> int:
    """The length of text that the release was trained on, which params.json does not have."""
    theta = float(params.get("rope_theta") or _theta(params))
    if scaling:
        return 131072
    if params.get("sliding_window") or params.get("hidden_dim"):
        return 32768  # Mistral
    if theta == 10000.0:
        return 2048 if params.get("norm_eps") == 1e-6 else 4096  # LLaMA 1, Llama 2
    return 16384 if theta == 1e6 else 8192  # Code Llama, Llama 3


def _theta(params: dict[str, Any]) -> float:
    """The rotary base where params.json has none: Mistral's own code takes another one without a window."""
    return 1e6 if "hidden_dim" in params and not params.get("sliding_window") else 10000.0


def _is_tied(raw: RawFolder) -> bool:
    """Whether the output matrix is the embedding, be it written twice."""
    return HEAD not in raw.tensors or raw.is_repeated(HEAD, EMBEDDING)


def unsupported(model: ModelConfig, shards: int) -> list[str]:
    """What raw LLaMA files cannot express, one phrase each."""
    family = "mistral" if _is_mistral(model) else "llama"
    reasons = FAMILIES[family].unsupported(model)
    if model.output_head == "reward":
        reasons.append("train_impl: rm (it has logits only)")
    if model.activation != "swiglu":
        reasons.append(f"activation: {model.activation} (it has swiglu only)")
    if family == "llama" and (model.use_bias_in_attn_linear or model.use_bias_in_mlp):
        reasons.append("use_bias_in_attn_linear or use_bias_in_mlp (it has no biases)")
    scaling = dict(model.rope_scaling or {})
    kind, _ = scaling.pop("rope_type", "llama3"), scaling.pop("factor", None)
    if model.rope_scaling and (kind != "llama3" or {**scaling, "high_freq_factor": 4.0} != STRETCHED):
        reasons.append(f"rope_scaling: {model.rope_scaling} (it has Llama 3.1's only, from 8192 positions on)")
    for name, size in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_kv_heads", model.num_kv_heads),
        ("the feed-forward's width", model.ffn_width),
    ):
        if size % shards:
            reasons.append(f"{name} {size}, which cannot be divided over {shards} files")
    return reasons


def params_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """params.json as the reference code of LLaMA, or of Mistral where the model needs it, reads it."""
    shape = {
        "dim": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.num_kv_heads,
        "norm_eps": model.rms_norm_epsilon,
        "vocab_size": vocab_size,
        # The code of LLaMA 1 and 2 has this base, and does not know the field.
        **({} if model.rotary_emb_base == 10000 else {"rope_theta": float(model.rotary_emb_base)}),
    }
    if _is_mistral(model):
        window = model.layer_windows[0] if model.layer_windows else None
        more = {} if window is None else {"sliding_window": window + 1}
        shape["rope_theta"] = float(model.rotary_emb_base)
        return {**shape, "head_dim": model.head_dim, "hidden_dim": model.ffn_width, **more}
    multiple, multiplier = _width_of(model.hidden_size, model.ffn_width)
    scaling = model.rope_scaling or {}
    return {
        **shape,
        "multiple_of": multiple,
        **({} if multiplier is None else {"ffn_dim_multiplier": multiplier}),
        **({"use_scaled_rope": True, "rope_scaling_factor": scaling["factor"]} if scaling else {}),
        **({"rope_high_freq_factor": scaling["high_freq_factor"]} if scaling else {}),
    }


def _is_mistral(model: ModelConfig) -> bool:
    """Whether LLaMA's own parameters lack what the model needs: a window, heads of their own width."""
    windows = any(window is not None for window in model.layer_windows or ())
    return windows or model.head_dim * model.num_attention_heads != model.hidden_size


def _width_of(hidden: int, width: int) -> tuple[int, float | None]:
    """(multiple_of, ffn_dim_multiplier) from which the reference code computes this width."""
    for multiple, multiplier in _WIDTHS:
        if computed_width(hidden, multiple, multiplier) == width:
            return multiple, multiplier
    whole = computed_width(hidden, 1, None)
    return width, None if whole <= width else width / whole


def computed_width(hidden: int, multiple_of: int, multiplier: float | None) -> int:
    """The width of the feed-forward in the reference code of LLaMA."""
    width = int(2 * (4 * hidden) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)
