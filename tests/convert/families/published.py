"""Published config.json files by the shipped config of the same model.

Written from the public hyper-parameters, with the fields that files of that time have.
"""

from __future__ import annotations

from typing import Any

from tests.convert.families import mamba_cases as mamba
from tests.convert.families import moe_cases as moe
from tests.convert.families import rwkv_cases as rwkv
from tests.convert.families.published_gemma_phi import GEMMA_PHI

# fmt: off
_COMMON: dict[str, Any] = {
    "use_cache": True, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
}
_QWEN: dict[str, Any] = {
    **_COMMON, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "attention_dropout": 0.0, "vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151643,
    "use_sliding_window": False, "num_hidden_layers": 28, "max_window_layers": 28,
}
_OLMO: dict[str, Any] = {
    **_COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 500000, "rope_scaling": None,
    "attention_dropout": 0.0, "attention_bias": False, "vocab_size": 100352, "pad_token_id": 100277,
    "eos_token_id": 100257, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA_3: dict[str, Any] = {
    **_LLAMA, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "vocab_size": 128256, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False,
    "pretraining_tp": 1, "rope_scaling": None, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
}
_LLAMA_3_1 = {
    "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama/llama1-7B": {**_LLAMA, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "pad_token_id": 0},
    "llama/llama1-65B": {
        **_LLAMA, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "hidden_size": 8192,
        "intermediate_size": 22016, "num_attention_heads": 64, "num_hidden_layers": 80,
    },
    "llama/llama2-7B": {**_LLAMA, "num_key_value_heads": 32, "pretraining_tp": 1, "rope_scaling": None},
    "llama/llama2-70B": {
        **_LLAMA, "num_key_value_heads": 8, "pretraining_tp": 1, "rope_scaling": None, "hidden_size": 8192,
        "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    },
    "llama/llama3-8B": _LLAMA_3,
    "llama/llama3.1-8B": {**_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, **_LLAMA_3_1}},
    "llama/llama3.1-405B": {
        **_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, **_LLAMA_3_1},
        "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126,
    },
    "llama/llama3.2-1B": {
        **_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 32.0, **_LLAMA_3_1}, "head_dim": 64,
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True,
    },
    "llama/llama3.2-3B": {
        **_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 32.0, **_LLAMA_3_1}, "head_dim": 128,
        "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "llama/llama3.3-70B": {
        **_LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, **_LLAMA_3_1}, "head_dim": 128,
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    },
    "mistral/7B": _MISTRAL,
    "mistral/7B-v0.3": {**_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
    "mistral/nemo-12B": {
        **_MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072, "head_dim": 128,
        "hidden_size": 5120, "num_hidden_layers": 40, "max_position_embeddings": 131072, "attention_dropout": 0.0,
    },
    "mistral/small-24B": {
        **_MISTRAL, "rope_theta": 100000000.0, "sliding_window": None, "vocab_size": 131072, "head_dim": 128,
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "attention_dropout": 0.0,
    },
    "qwen2/7B": {
        **_QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "sliding_window": 131072,
        "max_position_embeddings": 131072, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "qwen2.5/72B": {
        **_QWEN, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8192,
        "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "sliding_window": 131072, "max_window_layers": 80, "max_position_embeddings": 131072, "vocab_size": 152064,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-05,
    },
    "olmo3/7B-64k": {
        **_OLMO, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "max_position_embeddings": 65536,
        "sliding_window": 4096, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "falcon/11B": {
        **_COMMON, "model_type": "falcon", "architectures": ["FalconForCausalLM"], "activation": "gelu", "alibi": False,
        "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "ffn_hidden_size": 16384,
        "hidden_dropout": 0.0, "hidden_size": 4096, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 8192,
        "multi_query": True, "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60,
        "num_kv_heads": 8, "num_ln_in_parallel_attn": 1, "parallel_attn": True, "rope_scaling": None,
        "rope_theta": 500042.0, "tie_word_embeddings": True, "vocab_size": 65024,
    },
    "phi3/phi4": {
        **_COMMON, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "auto_map": {}, "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17920, "max_position_embeddings": 16384,
        "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384, "pad_token_id": 100257, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
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
    **mamba.PUBLISHED,
    **rwkv.PUBLISHED,
    **moe.PUBLISHED,
    **GEMMA_PHI,
}
# fmt: on
