"""Keys that are accepted with a warning and do nothing, and other names of keys.

A retired key is dead in GPT-NeoX, or only steered how its kernels and memory worked without changing results, or is an
unknown key found in its shipped files. The text names what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Retired:
    """What GPT-NeoX's default was (only another value is worth a warning of its own) and what to use instead."""

    default: Any
    instead: str


class _Never:
    def __repr__(self) -> str:
        return "(none)"


NEVER_DEFAULT = _Never()
"""Default of keys that GPT-NeoX does not know: any value is worth a warning."""

_FUSED = "fusions are chosen by attention_backend and torch_compile and never change results"
_SCALE = "the loss scale is set in the fp16 dict"
_RUNTIME = "it is found at run time"
_MEMORY = "use checkpoint_policy, sequence_parallel or ZeRO to save memory"
_OLD = "it has no meaning"

RETIRED: dict[str, Retired] = {
    # dead in GPT-NeoX
    "num_unique_layers": Retired(None, "layer sharing does not exist"),
    "param_sharing_style": Retired("grouped", "layer sharing does not exist"),
    "use_bias_in_norms": Retired(True, "the norm decides: layernorm has a bias, rmsnorm has none"),
    "weight_server_port": Retired(6000, "weights are not served"),
    "moe_lbl_in_fp32": Retired(False, "the balance loss (moe_aux_loss_coeff) is always computed in fp32"),
    "zero_reduce_scatter": Retired(None, "use zero_optimization.reduce_scatter"),
    "zero_contiguous_gradients": Retired(None, "use zero_optimization.contiguous_gradients"),
    "zero_reduce_bucket_size": Retired(None, "use zero_optimization.reduce_bucket_size"),
    "zero_allgather_bucket_size": Retired(None, "use zero_optimization.allgather_bucket_size"),
    "short_seq_prob": Retired(0.1, _OLD),
    "adlr_autoresume": Retired(False, "a run continues from `save` by itself"),
    "adlr_autoresume_object": Retired(None, "a run continues from `save` by itself"),
    "adlr_autoresume_interval": Retired(1000, "a run continues from `save` by itself"),
    "deepscale": Retired(False, "use deepspeed"),
    "deepscale_config": Retired(None, "use deepspeed_extra_args"),
    "deepspeed_activation_checkpointing": Retired(True, "use checkpoint_activations"),
    "clip_grad": Retired(1.0, "use gradient_clipping"),
    "hysteresis": Retired(2, f"{_SCALE}: fp16.hysteresis"),
    "dynamic_loss_scale": Retired(None, f"{_SCALE}: fp16.loss_scale 0 is dynamic"),
    "loss_scale": Retired(None, f"{_SCALE}: fp16.loss_scale"),
    "loss_scale_window": Retired(1000.0, f"{_SCALE}: fp16.loss_scale_window"),
    "min_scale": Retired(1.0, f"{_SCALE}: fp16.min_loss_scale"),
    "mup_attn_temp": Retired(1.0, "GPT-NeoX never reads it"),
    "mup_output_temp": Retired(1.0, "GPT-NeoX never reads it"),
    # kernels and memory of GPT-NeoX: results do not depend on them here
    "layernorm_fusion": Retired(False, _FUSED),
    "rmsnorm_fusion": Retired(False, _FUSED),
    "use_flashattn_swiglu": Retired(False, _FUSED),
    "scaled_upper_triang_masked_softmax_fusion": Retired(False, _FUSED),
    "scaled_masked_softmax_fusion": Retired(False, _FUSED),
    "bias_dropout_fusion": Retired(False, _FUSED),
    "rope_fusion": Retired(False, _FUSED),
    "fused_kernels_build_path": Retired(None, "there are no fused kernels to build"),
    "fp16_lm_cross_entropy": Retired(False, "the loss is always computed in fp32"),
    "attention_softmax_in_fp32": Retired(False, "the softmax of attention is always computed in fp32"),
    "apply_query_key_layer_scaling": Retired(False, "the scaling cancels out; the softmax is computed in fp32"),
    "onnx_safe": Retired(False, "GELU is the exact one unless bias_gelu_fusion is set"),
    "rotary_save_freqs_buffer": Retired(False, "rotary tables are rebuilt from rotary_emb_base"),
    "use_cpu_initialization": Retired(False, "initial weights are the same on every device and layout"),
    "partition_activations": Retired(False, _MEMORY),
    "contiguous_checkpointing": Retired(False, _MEMORY),
    "checkpoint_in_cpu": Retired(False, _MEMORY),
    "synchronize_each_layer": Retired(False, "run with CUDA_LAUNCH_BLOCKING=1 to find a failing kernel"),
    "profile_backward": Retired(False, "profile: true records the time of every operation"),
    "lazy_mpu_init": Retired(False, "ranks are set up at start"),
    # found at run time
    "local_rank": Retired(None, _RUNTIME),
    "rank": Retired(None, _RUNTIME),
    "user_script": Retired(None, _RUNTIME),
    "tokenizer": Retired(None, "use tokenizer_type, vocab_file and merge_file"),
    "tensorboard_writer": Retired(None, "use tensorboard_dir"),
    "comet_experiment": Retired(None, _RUNTIME),
    "config_files": Retired(None, "the resolved config is stored with each checkpoint"),
    "is_pipe_parallel": Retired(False, "it follows from pipe_parallel_size"),
    "batch_size": Retired(None, "use train_micro_batch_size_per_gpu"),
    "curriculum_seqlen": Retired(0, "it is internal to curriculum_learning"),
    # unknown keys in GPT-NeoX's shipped files
    "attention_type": Retired(NEVER_DEFAULT, "use attention_config"),
    "decay_lr_to": Retired(NEVER_DEFAULT, "use min_lr (a learning rate, not a fraction)"),
    "warmup_iters": Retired(NEVER_DEFAULT, "use warmup: a fraction of the schedule, or a text: 500 steps"),
}

OTHER_VERSIONS: dict[str, str] = {
    "hidden_act": "Hugging Face's key; write activation: swiglu (or geglu) where it is a gated model's silu (or gelu)",
    "tie_word_embeddings": "Hugging Face's key; write no_weight_tying, its opposite",
    "attention_bias": "Hugging Face's key; write use_bias_in_attn_linear",
    "mlp_bias": "Hugging Face's key; write use_bias_in_mlp",
    "sliding_window": "Hugging Face's key, which counts the token itself; write sliding_window_width, one less",
    "layer_types": "Hugging Face's key; write attention_config with 'local' and 'global' layers",
    "rope_parameters": "Hugging Face's key; write rotary_emb_base, rotary_pct and rope_scaling",
    "n_shared_experts": "write moe_shared_expert_size, the width of the shared experts together",
    "swiglu": "Megatron's key; write activation: swiglu",
    "normalization": "Megatron's key; write norm: layernorm or norm: rmsnorm",
    "position_embedding_type": "Megatron's key; write pos_emb",
    "add_bias_linear": "Megatron's key; write use_bias_in_attn_linear and use_bias_in_mlp",
    "qk_layernorm": "Megatron's key; write use_separate_qk_norms and qk_norm_per_head",
    "moe_layer_freq": "Megatron's key; write moe_expert_interval or moe_layers",
    "mlp_type": "an older GPT-NeoX's key; for mlp_type: llama write activation: swiglu and intermediate_size",
    "context_parallel_size": "context parallelism is not available yet; use sequence_parallel",
    "virtual_pipeline_model_parallel_size": "interleaved pipelines are not available",
    # of other trainers; a key with a similar name here would mislead
    **dict.fromkeys(("n_layer", "n_layers"), "write num_layers"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "write num_attention_heads"),
    **dict.fromkeys(("n_embd", "d_model", "hidden_dim"), "write hidden_size"),
    **dict.fromkeys(("max_seq_len", "max_length"), "write seq_length"),
    "dropout": "write hidden_dropout and attention_dropout",
    "tie_embeddings": "write no_weight_tying, its opposite",
    "rotary": "write pos_emb: rotary",
    **dict.fromkeys(
        ("use_flash_attention", "use_flash_attn", "flash_attention", "attn_implementation"),
        "write attention_backend: flash (auto takes it where it can)",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "write precision"),
    "gradient_checkpointing": "write checkpoint_activations",
    "per_device_train_batch_size": "write train_micro_batch_size_per_gpu",
    "accumulate_grad_batches": "write gradient_accumulation_steps",
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "write train_epochs"),
    **dict.fromkeys(
        ("warmup_steps", "warmup_ratio", "lr_warmup_iters", "lr_warmup_steps"),
        "write warmup, the fraction of lr_decay_iters for which the rate rises, or a text: 500 steps",
    ),
    "lr_scheduler_type": "write lr_decay_style",
    **dict.fromkeys(("decay_steps", "lr_decay_steps"), "write lr_decay_iters"),
    **dict.fromkeys(("min_learning_rate", "lr_min", "lr_end"), "write min_lr"),
    **dict.fromkeys(
        ("beta1", "beta2", "adam_beta1", "adam_beta2"), "write optimizer: {params: {betas: [0.9, 0.95]}} with its own"
    ),
    **dict.fromkeys(("adam_eps", "adam_epsilon"), "write optimizer: {params: {eps: 1.0e-8}} with its own"),
    "epsilon": "of GRPO write grpo_epsilon, of Adam optimizer: {params: {eps: 1.0e-8}}",
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "write gradient_clipping"),
    **dict.fromkeys(("save_steps", "save_every"), "write checkpoint_factor"),
    **dict.fromkeys(("logging_steps", "log_every"), "write log_interval"),
    "eval_steps": "write eval_interval",
    **dict.fromkeys(("save_path", "output_dir", "checkpoint_path"), "write save"),
    **dict.fromkeys(("load_path", "resume_from", "resume_from_checkpoint"), "write load"),
    **dict.fromkeys(("tokenizer_path", "tokenizer_name"), "write vocab_file, and tokenizer_type for its kind"),
    **dict.fromkeys(("dataset", "train_data", "train_dataset"), "write data_path, or train_data_paths for several"),
    "wandb_entity": "write wandb_team",
    # of TRL and PEFT
    "loss_type": "TRL's key; write dpo_loss_type, kto_loss_type or grpo_loss",
    "beta": "TRL's key; write dpo_beta or kto_beta, and for completions kl_div_beta",
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor"), "TRL's key; write dpo_label_smoothing"),
    "reference_free": "TRL's key; write dpo_reference_free",
    **dict.fromkeys(("rpo_alpha", "cpo_alpha", "sft_loss_weight"), "TRL's key; write dpo_sft_loss_weight"),
    "simpo_gamma": "TRL's key; write dpo_simpo_gamma",
    "desirable_weight": "TRL's key; write kto_desirable_weight",
    "undesirable_weight": "TRL's key; write kto_undesirable_weight",
    "center_rewards_coefficient": "TRL's key; write rm_center_coefficient",
    **dict.fromkeys(
        ("ref_model", "model_name_or_path", "pretrained_model_name_or_path"),
        "write load, with finetune: true; the reference is the model that the run begins with",
    ),
    **dict.fromkeys(
        ("precompute_ref_log_probs", "reference_model_precompute"),
        "TRL's key; a pass before the first step does it, write reference_path for where its results are",
    ),
    "sync_ref_model": "TRL's key; the reference stays the model that the run begins with",
    "disable_dropout": "TRL's key; write hidden_dropout and attention_dropout",
    **dict.fromkeys(("packing", "packing_strategy", "padding_free"), "TRL's key; write pack_impl"),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "train_on_inputs"),
        "write train_label_data_paths: labels of the data say what is trained (documentation/chat_data.md)",
    ),
    "num_generations": "TRL's key; write rollouts_per_prompt",
    "max_completion_length": "TRL's key; write rollout_tokens",
    "max_prompt_length": "TRL's key; prompts that with rollout_tokens exceed seq_length are left out, none is cut",
    "num_iterations": "TRL's key; write rollout_steps",
    "epsilon_high": "TRL's key; write grpo_epsilon_high",
    "scale_rewards": "TRL's key; write grpo_scale_rewards",
    "reward_funcs": "TRL's key; write reward, reward_url or reward_model",
    "use_vllm": "TRL's key; leave it out: completions are made by the ranks themselves",
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), "write distill_teacher"),
    **dict.fromkeys(("r", "lora_rank", "use_lora", "use_peft", "peft_type"), "write lora_r, the rank of adapters"),
    **dict.fromkeys(("alpha", "lora_scaling"), "write lora_alpha"),
    **dict.fromkeys(
        ("target_modules", "lora_target", "lora_targets", "lora_modules", "layers_to_transform"),
        "write lora_target_modules; q_proj, k_proj and v_proj are one layer here, query_key_value",
    ),
    "modules_to_save": "PEFT's key; write parameter_groups, with freeze: false for what is trained beside adapters",
}
"""Keys of other versions and trainers whose meaning must not get lost: an error that names what to write."""

ALIASES: dict[str, str] = {
    "tensor_model_parallel_size": "model_parallel_size",
    "tensor_parallel_size": "model_parallel_size",
    "tp_size": "model_parallel_size",
    "pipeline_model_parallel_size": "pipe_parallel_size",
    "pipeline_parallel_size": "pipe_parallel_size",
    "pp_size": "pipe_parallel_size",
    "gas": "gradient_accumulation_steps",
    "save_interval": "checkpoint_factor",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "max_steps": "train_iters",
    "num_key_value_heads": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "rope_theta": "rotary_emb_base",
    "rotary_base": "rotary_emb_base",
    "rotary_percent": "rotary_pct",
    "num_hidden_layers": "num_layers",
    "kv_channels": "head_dim",
    "rms_norm_eps": "rms_norm_epsilon",
    "layer_norm_eps": "layernorm_epsilon",
    "untie_embeddings_and_output_weights": "no_weight_tying",
    "num_experts": "moe_num_experts",
    "num_local_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "moe_router_topk": "moe_top_k",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "ep_size": "expert_parallel_size",
    "train_data_path": "train_data_paths",
    "ffn_hidden_size": "intermediate_size",
    "learning_rate": "lr",
    "clip_grad_norm": "gradient_clipping",
}
"""Names of other trainers (and of GPT-NeoX's documentation) -> ours."""
