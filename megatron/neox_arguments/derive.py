"""Derived values and cross-checks: small rules, applied in a fixed order, in two phases.

Phase one (`derive(args)`) needs the config alone. Phase two (`derive(args, Facts(...))`) is the same list of rules with
what the run knows: vocabulary, ranks, size of the data, names in registries. Deriving twice changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.neox_arguments import (
    rules_data,
    rules_engine,
    rules_experts,
    rules_feed_forward,
    rules_health,
    rules_mamba,
    rules_mixture,
    rules_model,
    rules_moe,
    rules_objective,
    rules_output,
    rules_pairs,
    rules_parallel,
    rules_post,
    rules_ramp,
    rules_reference,
    rules_rollouts,
    rules_rwkv,
    rules_scales,
    rules_schedule,
    rules_start,
    rules_train,
    rules_transformer_engine,
    rules_unlearning,
)
from megatron.neox_arguments.callback_key import check_callbacks
from megatron.neox_arguments.draft import Draft, Facts, Rule
from megatron.neox_arguments.problems import Problems, collector

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

__all__ = ["RULES", "Facts", "check_device", "check_trainable", "derive"]

RULES: tuple[Rule, ...] = (
    Rule(rules_model.check_required),
    Rule(rules_transformer_engine.transformer_engine, fills=rules_transformer_engine.FILLED),
    Rule(rules_engine.layout_free, fills=("engine",)),
    Rule(
        rules_engine.repeatable,
        fills=("mamba_selective_scan_fusion", "mamba_causal_conv_fusion", "mamba_inner_func_fusion"),
    ),
    Rule(rules_parallel.waiting),
    Rule(rules_parallel.layout, fills=("world_size", "data_parallel_size")),
    Rule(rules_ramp.stages_in_steps, fills=(rules_ramp.SCHEDULE,)),
    Rule(
        rules_parallel.batch,
        fills=("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    ),
    Rule(rules_unlearning.unlearning, fills=("train_impl", "ga_rmu_layers")),
    Rule(rules_ramp.batch_sizes),
    Rule(rules_ramp.skipped_steps),
    Rule(rules_ramp.row_lengths),
    Rule(rules_parallel.pipeline_depth),
    Rule(rules_parallel.sequence_parallel),
    Rule(rules_model.width_split),
    Rule(rules_model.attention, fills=("attention_config", "layer_windows")),
    Rule(rules_model.heads, fills=("num_attention_heads", "num_kv_heads", "head_dim")),
    Rule(rules_mamba.widths, fills=("mamba_d_state", "mamba_dt_rank")),
    Rule(rules_rwkv.widths, fills=("dim_att", "ffn_dim", "head_size")),
    Rule(rules_model.positions, fills=("max_position_embeddings",)),
    Rule(rules_model.gating_layers),
    Rule(rules_model.relative_positions),
    Rule(rules_model.rope_scaling),
    Rule(rules_model.residual_form, fills=("use_separate_qk_norms",)),
    Rule(rules_moe.layer_mlps, fills=("layer_mlps",)),
    Rule(rules_scales.soft_caps),
    Rule(rules_scales.embedding),
    Rule(rules_scales.local_positions),
    Rule(rules_scales.value_embeddings),
    Rule(rules_objective.output_head, fills=("output_head",)),
    Rule(rules_scales.head_bias),
    Rule(rules_scales.unit_offset),
    Rule(rules_feed_forward.feed_forward, fills=("gated_width_rule", "ffn_width")),
    Rule(rules_moe.mixture_of_experts, fills=("moe_intermediate_size",)),
    Rule(rules_moe.router),
    Rule(rules_model.recomputation, fills=("checkpoint_policy", "checkpoint_activations")),
    Rule(rules_model.mup, fills=("mup_width_mult",)),
    Rule(rules_model.vocabulary, fills=("padded_vocab_size",)),
    Rule(rules_train.precision, fills=("precision", "fp16", "bf16")),
    Rule(rules_train.gradient_accumulation_type, fills=("data_types",)),
    Rule(rules_train.optimizer, fills=("optimizer_type", "lr", "weight_decay", "betas", "eps", "momentum")),
    Rule(rules_health.outliers, fills=("skip_outliers",)),
    Rule(rules_train.zero, fills=("zero_stage", "zero_optimization")),
    Rule(rules_engine.native_engine, fills=("zero_stage", "zero_optimization")),
    Rule(rules_engine.whole_matrices),
    Rule(rules_engine.curvature),
    Rule(rules_moe.bias_balancing),
    Rule(rules_experts.expert_parallel),
    Rule(rules_train.communication_type, fills=("communication_data_type",)),
    Rule(rules_train.engine_limits, fills=("wall_clock_breakdown",)),
    Rule(rules_mixture.named_mixture, fills=rules_mixture.FILLED),
    Rule(rules_pairs.pairs, fills=rules_pairs.FILLED),
    Rule(rules_data.data_paths, fills=("data_impl",)),
    Rule(rules_pairs.answers),
    Rule(rules_objective.strengths),
    Rule(rules_objective.preferences),
    Rule(rules_objective.read_by_others),
    Rule(rules_schedule.length, fills=rules_schedule.LENGTHS),
    Rule(rules_mixture.train_weights),
    Rule(rules_mixture.per_source),
    Rule(rules_mixture.valid_sets, fills=("valid_sets",)),
    Rule(rules_mixture.budgets, fills=("experiment_budget",)),
    Rule(rules_schedule.average, fills=("lr_decay_style",)),
    Rule(rules_schedule.schedule, fills=("min_lr", "lr_decay_iters", "warmup", *rules_schedule.FILLED)),
    Rule(rules_train.checkpoints),
    Rule(rules_health.gradient_noise),
    Rule(rules_health.attention),
    Rule(rules_health.spikes, fills=("on_spike",)),
    Rule(rules_post.adapters),
    Rule(rules_post.distillation),
    Rule(rules_start.init_from, fills=("init_from",)),
    Rule(rules_start.plugin_sources, fills=("plugin_sources",)),
    Rule(rules_rollouts.rollouts),
    Rule(rules_reference.reference),
    Rule(rules_train.evaluation, fills=("do_train", "do_valid", "do_test", "text_gen_type")),
    Rule(rules_output.profiling),
    Rule(rules_output.object_store),
    Rule(rules_output.evaluation_jobs),
    Rule(rules_output.exports),
    Rule(rules_output.samples),
    Rule(rules_data.registered_names),
    Rule(check_callbacks),
)


def derive(args: NeoXArgs, facts: Facts | None = None, problems: Problems | None = None) -> NeoXArgs:
    """A new `NeoXArgs` in which every derived value is filled in and every cross-check has passed.

    Raises one `UserError` for all rules that the config breaks. With `problems` they are added to it instead, nothing
    is checked that depends on what was found before, and keys in `problems.keys` of the result mean nothing.
    """
    with collector(problems) as found:
        draft = Draft(args, facts, found)
        for rule in RULES:
            draft.apply(rule)
    return args.from_values(draft.values, draft.sources, tuple(draft.notes))


def check_trainable(args: NeoXArgs, problems: Problems | None = None) -> None:
    """What only training needs: steps to do and data. Raises one `UserError`, or adds to `problems`."""
    training = args.training
    with collector(problems) as found:
        lengths = rules_schedule.LENGTHS
        if all(getattr(training, name) is None for name in lengths) and found.usable(*lengths):
            found.add(f"set train_iters (or {', '.join(lengths[1:])}): how long to train")
        keys = ("data_path", "train_data_paths", "mixture", "valid_sets", "train_impl", "dataset_impl")
        if found.usable(*keys) and (problem := rules_objective.data_problem(args)):
            found.add(problem)


def check_device(args: NeoXArgs, on_gpu: bool, problems: Problems | None = None) -> None:
    """What training on a CPU cannot do. Raises one `UserError`, or adds to `problems`."""
    backend = args.model.attention_backend
    for_gpus = backend in ("flash", "flex", "cudnn", "transformer_engine")
    with collector(problems) as found:
        if not on_gpu and args.optimizer.precision == "fp16" and found.usable("precision"):
            found.add("precision: fp16 needs a GPU; on a CPU use precision=bfloat16 or precision=fp32")
        if not on_gpu and for_gpus and found.usable("attention_backend"):
            found.add(f"attention_backend: {backend} cannot train on a CPU; use attention_backend=auto")
