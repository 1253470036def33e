"""What DeepSpeed is told: everything we mean, whatever its defaults are, and each live key that it is told about."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.training.engine_config import deepspeed_config
from tests.training.tiny import LLAMA

pytestmark = pytest.mark.cpu


def config_of(devices: int = 1, **keys: Any) -> dict[str, Any]:
    given = {**LLAMA, "train_micro_batch_size_per_gpu": 2, **keys}
    return deepspeed_config(derive(NeoXArgs.from_saved(given), Facts(vocab_size=67, num_devices=devices)))


def test_what_is_written_for_a_plain_config():
    assert config_of() == {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,  # we clip
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": "fp32",  # DeepSpeed's default is the model's type
        "wall_clock_breakdown": False,
        "dump_state": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False, "immediate_grad_update": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {
            "pipe_partitioned": False,
            "grad_partitioned": False,
            "use_reentrant": False,
            "activation_checkpoint_interval": 0,
        },
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }


@pytest.mark.parametrize(
    ("keys", "name", "expected"),
    [
        ({"train_batch_size": 16}, "train_batch_size", 16),
        ({"train_micro_batch_size_per_gpu": 4}, "gradient_accumulation_steps", 2),
        ({"prescale_gradients": True}, "prescale_gradients", True),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor", 2.0),
        ({"precision": "bfloat16", "fp32_allreduce": False}, "communication_data_type", "bf16"),
        ({"communication_data_type": "bf16"}, "communication_data_type", "bf16"),
        ({"steps_per_print": 7}, "steps_per_print", 7),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown", True),
        ({"wall_clock_breakdown": True}, "steps_per_print", 10),  # DeepSpeed divides by it
        ({"dump_state": True}, "dump_state", True),
        ({"precision": "bfloat16"}, "bf16", {"enabled": True, "immediate_grad_update": False}),
        ({"precision": "bfloat16"}, "zero_optimization", {"stage": 1}),
        ({"precision": "fp16"}, "zero_optimization", {"stage": 1}),
        ({"precision": "fp16", "fp16": {"loss_scale": 8.0}}, "fp16", {"enabled": True, "loss_scale": 8.0}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types", {"grad_accum_dtype": "bf16"}),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler", {"enabled": True}),
        ({"comms_logger": {"enabled": True}}, "comms_logger", {"enabled": True}),
        ({"csv_monitor": {"enabled": False}}, "csv_monitor", {"enabled": False}),
        ({"tensorboard": {"enabled": False}}, "tensorboard", {"enabled": False}),
        ({"wandb": {"enabled": False}}, "wandb", {"enabled": False}),
        ({"activation_checkpointing": {"profile": True}}, "activation_checkpointing", {"profile": True}),
        ({"deepspeed_extra_args": {"memory_breakdown": True}}, "memory_breakdown", True),
    ],
    ids=str,
)  # fmt: skip
def test_live_keys_reach_deepspeed(keys, name, expected):
    assert config_of(**keys)[name] == expected
    assert config_of().get(name) != expected


@pytest.mark.parametrize(
    ("precision", "stage", "devices", "expected"),
    [("fp32", 2, 1, 0), ("fp32", 2, 2, 2), ("fp32", 0, 2, 0), ("bfloat16", 3, 1, 3), ("bfloat16", 0, 2, 1)],
)
def test_the_zero_stage_that_runs(precision, stage, devices, expected):
    zero = {"stage": stage, "reduce_bucket_size": 1000}
    assert config_of(devices, precision=precision, zero_optimization=zero)["zero_optimization"] == {
        **zero,
        "stage": expected,
    }
