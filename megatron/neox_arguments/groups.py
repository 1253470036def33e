"""The groups of the configuration, and with them every declared key by name."""

from __future__ import annotations

import re
from functools import cache

from megatron.errors import nearest_name
from megatron.neox_arguments.keys import KeyInfo, group_keys
from megatron.neox_arguments.retired import ALIASES, OTHER_VERSIONS, RETIRED
from megatron.neox_arguments.schema_data import DataConfig, TokenizerConfig
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.schema_post import PostConfig
from megatron.neox_arguments.schema_system import DeepSpeedConfig, LauncherConfig, LoggingConfig, ParallelConfig
from megatron.neox_arguments.schema_train import (
    CheckpointConfig,
    GenerationConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

_NEAR = 0.76  # of a slip of the pen to the key that was meant; other names have an entry in OTHER_VERSIONS
_WORD = re.compile(r"\w+")

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "tokenizer": TokenizerConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
    "post": PostConfig,
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


def describe_unknown(name: str) -> tuple[str, str | None]:
    """What to say of a key that there is not, and the key that was meant, where a name is near."""
    if name in OTHER_VERSIONS:
        named = [word for word in _WORD.findall(OTHER_VERSIONS[name]) if word in all_keys()]
        return f"unknown key {name!r}: {OTHER_VERSIONS[name]}", named[0] if named else None
    usable = [name for name, info in all_keys().items() if info.derived is None and info.available]
    meant = nearest_name(name, [*usable, *ALIASES], _NEAR)
    if meant is None:
        return f"unknown key {name!r}; remove it (documentation/CONFIG_ARGUMENTS.md lists all)", None
    return f"unknown key {name!r}. Did you mean {meant!r}?", ALIASES.get(meant, meant)
