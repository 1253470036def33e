"""FP8 with delayed scaling, around what Transformer Engine's modules compute: the keys te_fp8_*."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.errors import UserError
from megatron.layers.transformer_engine import load
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

Region = Callable[[], AbstractContextManager[Any]]


class Precision(nn.Module):
    """The context in which a stage's layers run: FP8 in training under te_fp8_mha, else none."""

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self._region, self._how = fp8_region(model, state) if model.te_fp8_mha else (None, "")

    def region(self) -> AbstractContextManager[Any]:
        if self._region is not None and self.training and torch.is_grad_enabled():
            return self._region()
        return nullcontext()

    def describe(self) -> tuple[str, str] | None:
        return ("FP8", self._how) if self._how else None


def fp8_region(model: ModelConfig, state: ParallelState) -> tuple[Region | None, str]:
    """(what makes the context of a forward pass in FP8, or None; how it is, for the log).

    One context goes around all layers of a stage, because leaving it moves the scales of all modules on by one step;
    the largest values are taken over tensor-parallel ranks. Layers that are computed again in the backward pass would
    meet other scales there, so they stay in the run's precision.
    """
    try:
        engine = load(state.device)
    except UserError as error:
        return None, f"off, {error}"
    if (model.checkpoint_policy or "none") != "none":
        return None, "off, layers are recomputed (checkpoint_policy); set it to none for FP8"
    if model.seq_length is None or model.seq_length % 16:
        return None, f"off, seq_length {model.seq_length} is no multiple of 16"
    available, reason = engine.is_fp8_available(return_reason=True)
    if not available:
        return None, f"off, {reason}"
    recipe = delayed_scaling(model)
    return partial(engine.autocast, enabled=True, recipe=recipe, amax_reduction_group=state.group("model")), str(recipe)


def delayed_scaling(model: ModelConfig) -> Any:
    """Transformer Engine's recipe of the keys te_fp8_*."""
    from transformer_engine.common.recipe import DelayedScaling, Format

    options: dict[str, Any] = {
        "margin": model.te_fp8_margin,
        "fp8_format": Format.E4M3 if model.te_fp8_format == "e4m3" else Format.HYBRID,
        "amax_history_len": model.te_fp8_amax_history_len,
        "amax_compute_algo": model.te_fp8_amax_compute_algo,
        "fp8_dpa": True,
    }
    if "override_linear_precision" in {field.name for field in fields(DelayedScaling)}:  # not in every 2.x
        options["override_linear_precision"] = (False, False, not model.te_fp8_wgrad)
    return DelayedScaling(**options)
