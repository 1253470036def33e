"""Derived values and cross-checks: small rules, applied in a fixed order, in two phases.

Phase one (`derive(args)`) needs the config alone. Phase two (`derive(args, Facts(...))`) is the same list of rules with
what the run knows: vocabulary, ranks, size of the data, names in registries. Deriving twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.errors import UserError
from megatron.neox_arguments import (
    rules_data,
    rules_experts,
    rules_mamba,
    rules_mixture,
    rules_model,
    rules_moe,
    rules_output,
    rules_parallel,
    rules_rwkv,
    rules_scales,
    rules_start,
    rules_train,
)
from megatron.neox_arguments.callback_key import check_callbacks
from megatron.neox_arguments.draft import Draft, Facts

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

__all__ = ["RULES", "Facts", "check_device", "check_trainable", "derive"]

RULES: tuple[Callable[[Draft], None], ...] = (
    rules_model.check_required,
    rules_parallel.layout,
    rules_parallel.batch,
    rules_parallel.pipeline_depth,
    rules_parallel.sequence_parallel,
    rules_model.width_split,
    rules_model.attention,
    rules_model.heads,
    rules_mamba.widths,
    rules_rwkv.widths,
    rules_model.positions,
    rules_model.gating_layers,
    rules_model.relative_positions,
    rules_model.rope_scaling,
    rules_model.residual_form,
    rules_moe.layer_mlps,
    rules_scales.soft_caps,
    rules_scales.embedding,
    rules_scales.local_positions,
    rules_scales.head_bias,
    rules_scales.unit_offset,
    rules_model.feed_forward,
    rules_moe.mixture_of_experts,
    rules_moe.router,
    rules_model.recomputation,
    rules_model.mup,
    rules_model.vocabulary,
    rules_train.precision,
    rules_train.gradient_accumulation_type,
    rules_train.optimizer,
    rules_train.zero,
    rules_moe.bias_balancing,
    rules_experts.expert_parallel,
    rules_train.communication_type,
    rules_train.engine_limits,
    rules_mixture.named_mixture,
    rules_data.data_paths,
    rules_train.length,
    rules_mixture.train_weights,
    rules_mixture.per_source,
    rules_mixture.valid_sets,
    rules_mixture.budgets,
    rules_train.schedule,
    rules_train.checkpoints,
    rules_start.init_from,
    rules_start.plugin_sources,
    rules_train.evaluation,
    rules_output.profiling,
    rules_data.registered_names,
    check_callbacks,
)


def derive(args: NeoXArgs, facts: Facts | None = None) -> NeoXArgs:
    """A new `NeoXArgs` in which every derived value is filled in and every cross-check has passed.

    Raises `UserError` for the first rule that the config breaks.
    """
    draft = Draft(args, facts)
    for rule in RULES:
        rule(draft)
    return args.from_values(draft.values, draft.sources, tuple(draft.notes))


def check_trainable(args: NeoXArgs) -> None:
    """What only training needs: steps to do and data. Raises `UserError`."""
    if args.training.train_iters is None and args.training.train_epochs is None:
        raise UserError("set train_iters (or train_epochs): how long to train")
    if args.data.data_path is None and args.data.train_data_paths is None:
        raise UserError("set data_path, train_data_paths or mixture: what to train on")


def check_device(args: NeoXArgs, on_gpu: bool) -> None:
    """What training on a CPU cannot do. Raises `UserError`."""
    if on_gpu:
        return
    if args.optimizer.precision == "fp16":
        raise UserError("precision: fp16 needs a GPU; on a CPU use precision=bfloat16 or precision=fp32")
    if args.model.attention_backend in ("flash", "flex", "cudnn"):
        raise UserError(
            f"attention_backend: {args.model.attention_backend} cannot train on a CPU; use attention_backend=auto"
        )
