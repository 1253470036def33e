"""config.json of the families: published ones give the shipped configs; there and back; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron.convert.export import export
from megatron.convert.family import FAMILIES, TokenIds
from megatron.convert.import_hf import import_model
from megatron.convert.read_config import read_config
from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.load import load
from tests.convert.families import FAMILY_CASES, OLMO
from tests.convert.helpers import hugging_face, resolved
from tests.convert.test_import import tensors_in

pytestmark = pytest.mark.cpu

CONFIGS = Path(__file__).parents[2] / "configs"
CASES = [pytest.param(architecture, keys, id=f"{architecture}: {name}") for architecture, name, keys in FAMILY_CASES]
# Written from the public hyper-parameters, with the fields that files of that time have.
_COMMON = {"use_cache": True, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.40.0"}
_QWEN = {
    **_COMMON, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "attention_dropout": 0.0, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151643,
    "use_sliding_window": False, "num_hidden_layers": 28, "max_window_layers": 28,
}  # fmt: skip
_OLMO = {
    **_COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None,
    "attention_dropout": 0.0, "attention_bias": False, "vocab_size": 100352, "pad_token_id": 100277,
    "eos_token_id": 100257, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5/0.5B": {
        **_QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "sliding_window": 32768, "max_window_layers": 24, "tie_word_embeddings": True, "use_mrope": False,
    },
    "qwen3/0.6B": {
        **_QWEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "head_dim": 128,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "attention_bias": False,
        "sliding_window": None, "rope_scaling": None, "tie_word_embeddings": True,
    },
    "olmo2/7B": {
        **_OLMO, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "max_position_embeddings": 4096,
    },
    "olmo3/7B": {
        **_OLMO, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "max_position_embeddings": 8192,
        "sliding_window": 4096, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    },
    "gpt2/small": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "falcon/7B": {
        **_COMMON, "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False,
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False,
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "bos_token_id": 11, "eos_token_id": 11,
        "hidden_dropout": 0.0, "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
        "vocab_size": 65024,
    },
    "falcon/40B": {
        **_COMMON, "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False,
        "attention_dropout": 0.0, "bias": False, "hidden_dropout": 0.0, "hidden_size": 8192,
        "layer_norm_epsilon": 1e-05, "new_decoder_architecture": True, "num_attention_heads": 128, "num_kv_heads": 8,
        "num_hidden_layers": 60, "parallel_attn": True, "vocab_size": 65024,
    },
    "phi3/mini-4k": {
        **_COMMON, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1,
        "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_shipped_one(name):
    """Every architecture key, through the model that is built; and transformers reads back what we write."""
    config = PUBLISHED[name]
    family, keys = read_config(config, "config.json")
    facts = Facts(vocab_size=config["vocab_size"])
    shipped = derive(load([name], conf_dir=str(CONFIGS)), facts).model
    mine = resolved(**{**keys, "seq_length": shipped.seq_length, "train_micro_batch_size_per_gpu": 1}).model
    differing = {
        key: (value, getattr(mine, key)) for key, value in vars(shipped).items() if getattr(mine, key) != value
    }
    # kernels, memory and how a width was written are no matter of the architecture; "flash" is "global" there
    ignored = {
        "attention_config",
        "checkpoint_activations",
        "checkpoint_policy",
        "gated_width_rule",
        "intermediate_size",
    }
    assert differing.keys() <= ignored, differing
    written = FAMILIES[family].config(shipped, config["vocab_size"], TokenIds())
    theirs, ours = (AutoConfig.for_model(**fields).to_dict() for fields in (config, written))
    # of files and generation, or written differently for the same model (the keys above have been compared)
    about = {"architectures", "dtype", "torch_dtype", "auto_map", "transformers_version", "task_specific_params"}
    about |= {"bos_token_id", "eos_token_id", "pad_token_id", "n_ctx", "use_mrope", "n_inner", "attention_bias"}
    about |= {"apply_residual_connection_post_layernorm", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn"}
    about |= {"head_dim", "max_window_layers", "sliding_window", "rope_theta", "rope_scaling", "partial_rotary_factor"}
    assert {k: v for k, v in theirs.items() if k not in about} == {k: v for k, v in ours.items() if k not in about}


@pytest.mark.parametrize(("architecture", "keys"), CASES)
def test_there_and_back_is_bit_identical(tmp_path, architecture, keys):
    model, _ = hugging_face(resolved(**keys), architecture)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    tp = 2 if keys.get("num_kv_heads") != 1 else 1
    done = import_model(str(tmp_path / "hf"), tmp_path / "out", tp=tp)
    assert done.largest_difference < 1e-5
    export(tmp_path / "out", tmp_path / "again", tokenizer=False, architecture=architecture)
    theirs, again = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "again")
    assert theirs.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2.5/0.5B", {"use_mrope": True}, "use_mrope: True"),
        ("qwen3/0.6B", {"colour": "red"}, "colour: 'red'"),
        ("qwen3/0.6B", {"layer_types": ["chunked_attention"] * 28}, "layer_types: must be 28 times"),
        ("olmo3/7B", {"sliding_window": 1}, "sliding_window: 1"),
        ("gpt2/small", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("gpt2/small", {"embd_pdrop": 0.0}, "embd_pdrop: 0.0"),
        ("falcon/7B", {"alibi": True}, "alibi: True"),
        ("falcon/7B", {"num_ln_in_parallel_attn": 2}, "needs new_decoder_architecture"),
        ("phi3/mini-4k", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
    ],
)
def test_what_cannot_be_expressed_is_named(name, changes, message):
    with pytest.raises(UserError, match=message):
        read_config({**PUBLISHED[name], **changes}, "config.json")


def test_positions_by_kind_of_layer():
    """OLMo 3 scales those of layers without a window; whatever cannot be expressed is refused."""
    fields = FAMILIES["olmo3"].config(resolved(**OLMO).model, 67, TokenIds())
    fields["layer_types"][0] = "sliding_attention"
    keys = read_config(fields, "config.json")[1]
    assert keys["rotary_emb_base"] == OLMO["rotary_emb_base"] and "rotary_emb_base_local" not in keys
    scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    fields["rope_parameters"]["full_attention"] = scaled
    keys = read_config(fields, "config.json")[1]
    assert keys["rotary_emb_base_local"] == 500.0 and keys["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    fields["rope_parameters"]["sliding_attention"] = {**scaled, "factor": 3.0}
    with pytest.raises(UserError, match="differ between layers"):
        read_config(fields, "config.json")
    del fields["rope_parameters"]["sliding_attention"]
    fields["rope_parameters"]["rope_theta"] = 500.0
    with pytest.raises(UserError, match="rope_theta beside full_attention"):
        read_config(fields, "config.json")
