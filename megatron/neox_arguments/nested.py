"""The mappings inside a config (`fp16`, `zero_optimization`, `optimizer`, ...): their keys and types.

Stock DeepSpeed refuses keys it does not know, and many of GPT-NeoX's shipped files have such keys (`fp16.fp16`,
`fp16.type`, loss-scale keys in `bf16`). They are translated or dropped with a note; any other unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, Literal

from megatron.errors import UserError, nearest
from megatron.neox_arguments.coerce import WrongValue, check_path, coerce_type
from megatron.neox_arguments.keys import LARGEST, union_members
from megatron.neox_arguments.optimizer_params import param_types
from megatron.neox_arguments.problems import Problems, collector
from megatron.neox_arguments.schema_train import DTYPE_SPELLINGS

Schema = dict[str, Any]
"""Key -> type, or -> Schema for a mapping inside the mapping."""

_OFFLOAD: Schema = {
    "device": Literal["none", "cpu", "nvme"],
    "nvme_path": str,
    "buffer_count": int,
    "buffer_size": int,
    "max_in_cpu": int,
    "pin_memory": bool,
    "pipeline_read": bool,
    "pipeline_write": bool,
    "fast_init": bool,
    "ratio": float,
}

_TOKEN_IDS: Schema = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), int | tuple[int, ...] | None)

NESTED: dict[str, Schema] = {
    "fp16": {
        "enabled": bool,
        "auto_cast": bool,
        "loss_scale": float,
        "initial_scale_power": int,
        "loss_scale_window": int,
        "hysteresis": int,
        "consecutive_hysteresis": bool,
        "min_loss_scale": int,
        "fp16_master_weights_and_grads": bool,
    },
    "bf16": {
        "enabled": bool,
        "immediate_grad_update": bool,
        "check_grad_overflow": bool,
        "bf16_master_weights_and_grads": bool,
        "bf16_optimizer_states": bool,
    },
    "data_types": {"grad_accum_dtype": str},
    "zero_optimization": {
        "stage": int,
        "allgather_partitions": bool,
        "allgather_bucket_size": int,
        "overlap_comm": bool,
        "reduce_scatter": bool,
        "reduce_bucket_size": int,
        "use_multi_rank_bucket_allreduce": bool,
        "contiguous_gradients": bool,
        "round_robin_gradients": bool,
        "ignore_unused_parameters": bool,
        "offload_param": _OFFLOAD,
        "offload_optimizer": _OFFLOAD,
        "sub_group_size": int,
        "stage3_prefetch_bucket_size": int,
        "stage3_param_persistence_threshold": int,
        "stage3_model_persistence_threshold": int,
        "stage3_max_live_parameters": int,
        "stage3_max_reuse_distance": int,
        "stage3_gather_16bit_weights_on_model_save": bool,
        "stage3_use_all_reduce_for_fetch_params": bool,
        "prefetch_bucket_size": int,
        "param_persistence_threshold": int,
        "model_persistence_threshold": int,
        "max_live_parameters": int,
        "max_reuse_distance": int,
        "gather_16bit_weights_on_model_save": bool,
        "zero_hpz_partition_size": int,
        "zero_quantized_weights": bool,
        "zero_quantized_gradients": bool,
        "zero_quantized_nontrainable_weights": bool,
        "memory_efficient_linear": bool,
        "log_trace_cache_warnings": bool,
        "enable_sanity_checks": bool,
    },
    "activation_checkpointing": {
        "partition_activations": bool,
        "number_checkpoints": int,
        "contiguous_memory_optimization": bool,
        "cpu_checkpointing": bool,
        "profile": bool,
        "synchronize_checkpoint_boundary": bool,
    },
    "flops_profiler": {
        "enabled": bool,
        "recompute_fwd_factor": float,
        "profile_step": int,
        "module_depth": int,
        "top_modules": int,
        "detailed": bool,
        "output_file": str,
    },
    "comms_logger": {"enabled": bool, "prof_all": bool, "prof_ops": tuple[str, ...], "verbose": bool, "debug": bool},
    "tensorboard": {"enabled": bool, "output_path": str, "job_name": str},
    "wandb": {"enabled": bool, "group": str, "team": str, "project": str},
    "csv_monitor": {"enabled": bool, "output_path": str, "job_name": str},
    "seq_length_ramp": {"start": int, "steps": int, "tokens": int, "multiple": int},
    "init_from": {
        "path": str,
        "iteration": int,
        "data": Literal["continue", "restart"],
        "optimizer": Literal["keep", "reset"],
        "step": Literal["continue", "restart"],
        "vocab": Literal["keep", "resize"],
        "layer_map": tuple[int, ...],
    },
    "on_spike": {
        "do": Literal["warn", "rewind"],
        "window": int,
        "sigma": float,
        "steps": int,
        "before": int,
        "most": int,
    },
    "skip_outliers": {"window": int, "sigma": float},
    "model_tokens": {"config": _TOKEN_IDS, "generation": _TOKEN_IDS, "trained_ends": tuple[int, ...]},
}

_RANGES: dict[str, tuple[float, float]] = {
    "flops_profiler.module_depth": (-1, LARGEST),
    **{f"seq_length_ramp.{name}": (1, LARGEST) for name in ("start", "steps", "tokens", "multiple")},
    "fp16.hysteresis": (1, LARGEST),
    "fp16.initial_scale_power": (0, 127),  # of 2, and fp32 ends at 2^128
    "fp16.loss_scale_window": (1, LARGEST),
    "fp16.min_loss_scale": (1, LARGEST),
    # Some published models have no padding but -1.
    **{f"model_tokens.{file}.{name}": (-1, LARGEST) for file in ("config", "generation") for name in _TOKEN_IDS},
    "zero_optimization.offload_optimizer.ratio": (0, 1),
    "zero_optimization.offload_param.ratio": (0, 1),
    "zero_optimization.reduce_bucket_size": (1, LARGEST),
}
"""Smallest and largest value of the numbers that are not any from 0 on."""

_NO_SCALE = "bfloat16 has no loss scale"
DROPPED: dict[str, str] = {
    "fp16.fp16": "fp16.enabled is used",
    "bf16.bf16": "bf16.enabled is used",
    "bf16.type": "bf16.enabled is used",
    "bf16.loss_scale": _NO_SCALE,
    "bf16.loss_scale_window": _NO_SCALE,
    "bf16.hysteresis": _NO_SCALE,
    "bf16.min_loss_scale": _NO_SCALE,
    "bf16.initial_scale_power": _NO_SCALE,
    "bf16.consecutive_hysteresis": _NO_SCALE,
    "bf16.auto_cast": "weights are bfloat16 anyway",
    "bf16.fp16": "bf16.enabled is used",
    "optimizer.params.max_grad_norm": "use gradient_clipping",
    "optimizer.params.torch_adam": "Adam is always torch's fused one",
    "optimizer.params.adam_w_mode": "weight decay is always decoupled",
    "optimizer.params.bias_correction": "Adam always corrects its bias",
    "optimizer.params.cuda_aware": "gradients are not compressed",
    "optimizer.params.comm_backend_name": "gradients are not compressed",
    "zero_optimization.cpu_offload_use_pin_memory": "use zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold fp32 weights",
    "zero_optimization.elastic_checkpoint": "checkpoints can be read at any layout",
    "zero_optimization.legacy_stage1": "there is one stage 1",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "checkpoints hold whole weights",
    "activation_checkpointing.partitioned_activations": "use checkpoint_policy",
}
"""Inner keys that GPT-NeoX's files or old engines have and today's engine refuses -> why they can go."""

OFFLOADS = {
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_params": "offload_param",
}
"""Old switches -> the mapping that today's engine wants instead."""


def check_nested(
    name: str,
    value: dict[str, Any],
    where: Callable[[str], str],
    note: Callable[[str], None],
    problems: Problems | None = None,
) -> dict[str, Any]:
    """The mapping `name` with known keys only, in their types. `where(dotted)`: file and line for messages.

    Keys of `DROPPED` are left out with a note. Raises one `UserError` for unknown keys and wrong types, or adds them to
    `problems` as those of `name`.
    """
    schema = NESTED.get(name)
    if name == "optimizer":
        schema = {"type": str, "params": param_types(str(value.get("type")))}
    if schema is None:
        return value
    with collector(problems) as found:
        return _check(name, value, schema, where, note, found)


def _check(
    prefix: str,
    value: dict[str, Any],
    schema: Schema,
    where: Callable[[str], str],
    note: Callable[[str], None],
    found: Problems,
) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    key = prefix.split(".")[0]
    for written, inner in value.items():
        inner_key = str(written).replace("-", "_")
        dotted = f"{prefix}.{inner_key}"
        if dotted in DROPPED:
            note(f"{where(f'{prefix}.{written}')}: {dotted} is left out: {DROPPED[dotted]}")
            continue
        if dotted in OFFLOADS:  # false asks for nothing
            with found.collect(key):
                if _coerce(dotted, inner, bool | None, where(f"{prefix}.{written}")):
                    checked[OFFLOADS[dotted]] = {"device": "cpu"}
                    note(f"{where(f'{prefix}.{written}')}: {dotted} is read as {OFFLOADS[dotted]}: {{device: cpu}}")
            continue
        if dotted == "fp16.type":  # decided together with `precision`
            checked[inner_key] = inner
            continue
        if inner_key not in schema:
            hint = nearest(inner_key, list(schema))
            found.add(f"{where(f'{prefix}.{written}')}: unknown key {inner_key!r} in {prefix}.{hint}", key)
            continue
        kind = schema[inner_key]
        if inner is None and NoneType not in union_members(kind):
            continue
        if isinstance(kind, dict):
            if not isinstance(inner, dict):
                found.add(f"{where(f'{prefix}.{written}')}: {dotted}: expected a mapping, got {inner!r}", key)
            else:
                checked[inner_key] = _check(dotted, inner, kind, where, note, found)
            continue
        with found.collect(key):
            checked[inner_key] = _coerce(dotted, inner, kind, where(f"{prefix}.{written}"))
    return checked


def _coerce(dotted: str, value: Any, kind: Any, where: str) -> Any:
    """`value` in its type and range. Raises `UserError`."""
    try:
        value = coerce_type(value, kind)
        if dotted.endswith("path"):
            check_path(value)
    except WrongValue as error:
        raise UserError(f"{where}: {dotted}: {error}") from error
    least, most = _RANGES.get(dotted, (0, LARGEST))
    if type(value) in (int, float) and not least <= value <= most and dotted.split(".")[0] in NESTED:
        limits = f"at least {least}" if value < least else f"at most {most}"
        raise UserError(f"{where}: {dotted}: must be {limits}, is {value}")
    return value


def dtype_name(value: str) -> str:
    """fp32, bf16 or fp16 for any spelling of a type; the value itself when it is none."""
    return DTYPE_SPELLINGS.get(value.lower(), value.lower())
