"""Published config.json files of Gemma and Phi by the shipped config of the same model; see published.py."""

from __future__ import annotations

from typing import Any

# fmt: off
_GEMMA: dict[str, Any] = {
    "model_type": "gemma", "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "head_dim": 256, "hidden_act": "gelu",
    "initializer_range": 0.02, "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0", "use_cache": True,
    "vocab_size": 256000,
}
_GEMMA2: dict[str, Any] = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 8192,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True,
    "vocab_size": 256000,
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 32768,
    "num_attention_heads": 4, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}
# The text_config of models with a vision tower: what Gemma3ForCausalLM is made of. Their own files leave out most.
_WITH_VISION: dict[str, Any] = {
    **_GEMMA3, "max_position_embeddings": 131072, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024, "vocab_size": 262208,
}
_PHI: dict[str, Any] = {
    "model_type": "phi", "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None,
    "embd_pdrop": 0.0, "eos_token_id": None, "hidden_act": "gelu_new", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 24, "num_key_value_heads": None, "partial_rotary_factor": 0.5, "qk_layernorm": False,
    "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.37.0", "use_cache": True, "vocab_size": 51200,
}
GEMMA_PHI: dict[str, dict[str, Any]] = {
    "gemma/2B": {
        **_GEMMA, "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18,
        "num_key_value_heads": 1,
    },
    "gemma/7B": {
        **_GEMMA, "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma2/2B": {
        **_GEMMA2, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4,
    },
    "gemma2/9B": {
        **_GEMMA2, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "sliding_window_size": 4096,
    },
    "gemma2/27B": {
        **_GEMMA2, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32, "num_hidden_layers": 46,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window_size": 4096,
    },
    "gemma3/270M": {
        **_GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "_sliding_window_pattern": 6, "use_bidirectional_attention": False, "sliding_window_pattern": None,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    },
    "gemma3/1B": {**_GEMMA3, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
    "gemma3/4B": {
        **_WITH_VISION, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "gemma3/12B": {
        **_WITH_VISION, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    "gemma3/27B": {
        **_WITH_VISION, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
    },
    "phi/phi-1": _PHI,
    "phi/phi-1.5": _PHI,
    "phi/phi-2": {
        **_PHI, "bos_token_id": 50256, "eos_token_id": 50256, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "resid_pdrop": 0.1,
    },
}
# fmt: on

# (model, what is changed in its file, the message that names it)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma/2B", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
    ("gemma/2B", {"hidden_act": "tanh"}, "hidden_act: 'tanh'"),
    ("gemma2/2B", {"hidden_activation": "tanh"}, "hidden_activation: 'tanh'"),
    ("gemma2/9B", {"sliding_window_size": 2048}, "sliding_window_size: 2048"),
    ("gemma2/2B", {"layer_types": ["full_attention"]}, "must be 26 times"),
    ("gemma3/1B", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: 50.0 cannot be expressed here"),
    ("gemma3/1B", {"model_type": "gemma3"}, "vision tower"),
    ("gemma3/1B", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "longrope"),
    ("phi/phi-2", {"qk_layernorm": True}, "qk_layernorm: True"),
    ("phi/phi-2", {"tie_word_embeddings": True}, "tie_word_embeddings: True"),
]
