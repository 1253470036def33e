"""Inner keys that we let through are keys of the installed engine; those we leave out are not."""

from __future__ import annotations

import pytest

from megatron.neox_arguments.nested import DROPPED, NESTED
from megatron.neox_arguments.optimizer_params import param_types

pytestmark = pytest.mark.cpu


def _engine_names(model: type) -> set[str]:
    return {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}


def test_inner_keys_are_the_engine_s() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = {
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
    }
    for name, model in models.items():
        assert set(NESTED[name]) <= _engine_names(model), name
    offload = _engine_names(DeepSpeedZeroOffloadOptimizerConfig) | _engine_names(DeepSpeedZeroOffloadParamConfig)
    assert set(NESTED["zero_optimization"]["offload_optimizer"]) <= offload


def test_nothing_is_both_kept_and_left_out() -> None:
    for dotted in DROPPED:
        name, *inner = dotted.split(".")
        schema = {"params": param_types("adam")} if name == "optimizer" else NESTED[name]
        for part in inner[:-1]:
            schema = schema[part]
        assert inner[-1] not in schema
