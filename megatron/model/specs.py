"""What parameters the whole network has, asked without making it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.errors import UserError
from megatron.layers.lora import Adapters, fits
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import ParamSpec, named_parameters, spec_of
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


def model_specs(model: ModelConfig, vocab_size: int, adapters: Adapters | None = None) -> dict[str, ParamSpec]:
    """Declarations of all parameters by canonical name, in the order of the layers; takes no memory."""
    state = ParallelState.single("meta")
    sizes = {"vocab_size": vocab_size, "padded_vocab_size": vocab_size}
    specs: dict[str, ParamSpec] = {}
    for layer in gpt_layers(model, **sizes, state=state, adapters=adapters):
        if layer.tied is None:
            for name, parameter in named_parameters(build_layer(layer, None, state)):
                specs[name] = spec_of(parameter)
    return specs


def check_targets(model: ModelConfig, adapters: Adapters, where: str = "") -> None:
    """Every entry of `lora_target_modules` speaks of a linear layer. Raises `UserError` naming the first that does not.

    Args:
        where: the place at which the key was set, for the message.
    """
    every = model_specs(model, 1, Adapters(rank=1, scaling=1.0))
    layers = [name.removesuffix(".lora.A") for name in every if name.endswith(".lora.A")]
    for target in adapters.targets:
        if not any(fits(target, layer) for layer in layers):
            kinds = ", ".join(dict.fromkeys(layer.partition(".")[2] for layer in layers))
            raise UserError(
                f"{where}lora_target_modules: {target!r} is no linear layer of this model; its blocks have "
                f"{kinds or 'none'} (a fused matrix has one adapter: query_key_value for q_proj, k_proj and v_proj)"
            )
