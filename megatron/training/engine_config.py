"""The only file that knows DeepSpeed's JSON keys. Every key we mean is written, default or not.

DeepSpeed's own defaults are not what a missing key should mean (`gradient_clipping` becomes 1.0, the
pipeline partitions activations over tensor-parallel ranks and mixes shards under sequence parallel,
a device synchronisation per micro-batch for its timer), so silence is never left to it.
"""

from __future__ import annotations

from typing import Any

from megatron.neox_arguments import NeoXArgs

# Dicts of the YAML that DeepSpeed reads as they are.
PASSED_THROUGH = ("flops_profiler", "comms_logger", "csv_monitor", "tensorboard", "wandb", "activation_checkpointing")


def effective_zero_stage(args: NeoXArgs) -> int:
    """The ZeRO stage that runs: fp32 on one data rank has nothing to partition and runs as stage 0.

    bf16 and fp16 need stage 1 at least: below it DeepSpeed accumulates in the model's type, and in fp16 its optimizer
    keeps the gradients where nobody can clip them.
    """
    stage = args.optimizer.zero_stage or 0
    offloads = bool((args.optimizer.zero_optimization or {}).get("offload_optimizer"))
    if args.optimizer.precision == "fp32" and args.parallel.data_parallel_size == 1 and not offloads:
        return 0
    return stage if args.optimizer.precision == "fp32" else max(stage, 1)


def deepspeed_config(args: NeoXArgs) -> dict[str, Any]:
    """The `config` of `deepspeed.initialize` for a derived configuration.

    Gradient clipping is 0 here: `training/engine_update` clips, for every engine and precision alike.
    """
    training, optimizer, deepspeed = args.training, args.optimizer, args.deepspeed
    config: dict[str, Any] = {
        "train_batch_size": training.train_batch_size,
        "train_micro_batch_size_per_gpu": training.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_clipping": 0.0,
        "prescale_gradients": deepspeed.prescale_gradients,
        "gradient_predivide_factor": deepspeed.gradient_predivide_factor,
        "communication_data_type": deepspeed.communication_data_type,
        "steps_per_print": _steps_per_print(args),
        "wall_clock_breakdown": deepspeed.wall_clock_breakdown,
        "dump_state": deepspeed.dump_state,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(args),
        "fp16": _fp16(args),
        # Gradients are accumulated in hooks of `partition_comm.GradientSums`, not in DeepSpeed's.
        "bf16": {
            **(optimizer.bf16 or {}),
            "enabled": optimizer.precision == "bfloat16",
            "immediate_grad_update": False,
        },
        "data_types": {"grad_accum_dtype": _grad_accum_dtype(args)},
        "pipeline": {
            "pipe_partitioned": False,
            "grad_partitioned": False,
            "use_reentrant": False,
            "activation_checkpoint_interval": 0,
        },
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }
    for key in PASSED_THROUGH:
        if (value := getattr(deepspeed, key, None)) is not None:
            config[key] = value
    config.update(deepspeed.deepspeed_extra_args or {})
    return {key: value for key, value in config.items() if value is not None}


def owns_reduction(config: dict[str, Any]) -> bool:
    """Whether gradients are reduced here, with this configuration of DeepSpeed: in fp32, and without the factors that
    protect narrower types."""
    zero = config["zero_optimization"]
    return (
        config["bf16"]["enabled"]
        and zero["stage"] == 1
        and not zero.get("offload_optimizer")
        and config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"
        and not config["prescale_gradients"]
        and config["gradient_predivide_factor"] == 1.0
    )


def _steps_per_print(args: NeoXArgs) -> int | None:
    """None (DeepSpeed prints nothing) unless asked for; its timers divide by the number."""
    asked = args.is_set("steps_per_print") or args.deepspeed.wall_clock_breakdown
    return args.deepspeed.steps_per_print if asked else None


def _zero(args: NeoXArgs) -> dict[str, Any]:
    stage = effective_zero_stage(args)
    zero = {key: value for key, value in (args.optimizer.zero_optimization or {}).items() if key != "stage"}
    return {**zero, "stage": stage}


def _fp16(args: NeoXArgs) -> dict[str, Any]:
    fp16 = dict(args.optimizer.fp16 or {})
    return {**fp16, "enabled": args.optimizer.precision == "fp16"}


def _grad_accum_dtype(args: NeoXArgs) -> str:
    """fp32 unless the user sets another: DeepSpeed's default is the model's dtype."""
    if chosen := (args.optimizer.data_types or {}).get("grad_accum_dtype"):
        return chosen
    # Below stage 2 DeepSpeed accumulates fp16 in fp16 only.
    return "fp16" if args.optimizer.precision == "fp16" and effective_zero_stage(args) < 2 else "fp32"
