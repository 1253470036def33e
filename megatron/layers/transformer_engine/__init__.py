"""Layers by NVIDIA's Transformer Engine, where the package and a GPU are there.

A module of Transformer Engine does here what one rank does, with the parameters that the layer holds anyway: names,
checkpoints, initial values and conversions do not know it. Ranks, sequence parallelism and the one reduction of
gpt_j_residual stay with `mpu`. Without it the built-in layers compute the same numbers.

| where                             | module              | chosen by                                                |
|-----------------------------------|---------------------|----------------------------------------------------------|
| LINEAR_RECIPES (linear.py)        | Linear              | te_columnparallel, te_rowparallel, te_mha,               |
|                                   |                     | te_layernorm_mlp where LayerNormMLP does not fit         |
| ATTENTION_BACKENDS (attention.py) | DotProductAttention | te_mha, attention_backend                                |
| NORMS, te_* (../norms)            | LayerNorm, RMSNorm  | norm: te_layernorm, te_rmsnorm                           |
| feed_forward.py                   | LayerNormMLP        | te_layernorm_mlp                                         |

precision.py has the FP8 recipe. The interface is that of transformer_engine.pytorch 2.x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.home import installs

DEVICES = ("cuda",)


def load(device: torch.device) -> ModuleType:
    """`transformer_engine.pytorch`. Raises `UserError` that says why it cannot run on this device."""
    if device.type not in DEVICES:
        raise UserError("Transformer Engine needs a GPU")
    try:
        import transformer_engine.pytorch as engine
    except ImportError as error:
        raise UserError(f"Transformer Engine is not installed: {installs('transformerengine')}") from error
    except (OSError, RuntimeError) as error:  # a library of CUDA that is missing, or too old
        raise UserError(f"Transformer Engine does not start: {error}") from error
    module: ModuleType = engine
    return module


def find(device: torch.device) -> tuple[ModuleType | None, str]:
    """(`transformer_engine.pytorch`, "transformer-engine"), or (None, what runs instead and why)."""
    try:
        return load(device), "transformer-engine"
    except UserError as error:
        return None, f"built-in, the same numbers ({error})"


class Borrowed:
    """A module of Transformer Engine that computes with parameters that it is handed at each call.

    It owns none (it is made on the meta device), so that whoever holds them may shard, gather, cast and save them, and
    hand over what autograd made of them. FP8 scales, which it does own, are not part of a checkpoint.
    """

    def __init__(self, make: Callable[[torch.dtype], nn.Module]) -> None:
        """`make(type of the parameters)` gives the module; called once, with the first parameters."""
        self._make = make
        self._module: nn.Module | None = None

    def __call__(self, parameters: Mapping[str, Tensor | None], *inputs: Any, **options: Any) -> Any:
        """`parameters` by the module's names; None is left out."""
        given = {name: tensor for name, tensor in parameters.items() if tensor is not None}
        if self._module is None:
            self._module = self._make(next(iter(given.values())).dtype)
        for name, tensor in given.items():
            self._module._parameters[name] = tensor  # type: ignore[assignment]  # a tensor with a history is welcome
        return self._module(*inputs, **options)
