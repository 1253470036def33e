"""The groups of the configuration, and with them every declared key by name."""

from __future__ import annotations

from functools import cache

from megatron.neox_arguments.keys import KeyInfo, group_keys
from megatron.neox_arguments.retired import RETIRED
from megatron.neox_arguments.schema_data import DataConfig, TokenizerConfig
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.schema_system import DeepSpeedConfig, LauncherConfig, LoggingConfig, ParallelConfig
from megatron.neox_arguments.schema_train import (
    CheckpointConfig,
    GenerationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "tokenizer": TokenizerConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
    "generation": GenerationConfig,
    "parallel": ParallelConfig,
    "launcher": LauncherConfig,
    "logging": LoggingConfig,
    "deepspeed": DeepSpeedConfig,
}


@cache
def all_keys() -> dict[str, KeyInfo]:
    """Every declared key by name, in the order of the documentation."""
    keys: dict[str, KeyInfo] = {}
    for group, group_class in GROUPS.items():
        for name, info in group_keys(group_class, group).items():
            if name in keys or name in RETIRED:
                raise TypeError(f"key {name} is declared twice")
            keys[name] = info
    return keys
