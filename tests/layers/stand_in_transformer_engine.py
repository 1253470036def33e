"""The interface of Transformer Engine in plain torch: what its documentation says of the modules that Deepy calls.

It keeps the habits that a caller can trip over: parameters on the meta device until they are given, one type for input
and parameters, the last bias of `LayerNormMLP` returned and not added under `return_bias`, and none of it inside a
region of FP8 more than once. `CALLS` has the class of every module that ran, `REGIONS` the options of every region.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layers import transformer_engine

CALLS: list[str] = []
REGIONS: list[dict[str, Any]] = []
FP8 = {"available": True}


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


_ran_in_region: list[set[int]] = []


class _Module(nn.Module):
    def _start(self, x: Tensor) -> None:
        for name, parameter in self.named_parameters():
            assert parameter.device == x.device, f"{name} is on {parameter.device}"
            if parameter.dtype != x.dtype:
                raise TypeError(f"input {x.dtype}, {name} {parameter.dtype}")
        if _ran_in_region:
            assert id(self) not in _ran_in_region[-1], "called twice inside one region"
            _ran_in_region[-1].add(id(self))
        CALLS.append(type(self).__name__)

    def _add(self, name: str, *shape: int, dtype: Any, device: Any) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))


class Linear(_Module):
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, params_dtype: Any = None, device: Any = "cuda"
    ) -> None:
        super().__init__()
        self.use_bias = bias
        self._add("weight", out_features, in_features, dtype=params_dtype, device=device)
        if bias:
            self._add("bias", out_features, dtype=params_dtype, device=device)

    def forward(self, inp: Tensor) -> Tensor:
        self._start(inp)
        return F.linear(inp, self.weight, self.bias if self.use_bias else None)


class LayerNorm(_Module):
    def __init__(self, normalized_shape: int, *, eps: float = 1e-5, dtype: Any = None, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self._add("weight", normalized_shape, dtype=dtype, device=device)
        self._add("bias", normalized_shape, dtype=dtype, device=device)

    def forward(self, inp: Tensor) -> Tensor:
        self._start(inp)
        return _layer_norm(inp, self.weight, self.bias, self.eps)


class RMSNorm(_Module):
    def __init__(self, normalized_shape: int, *, eps: float = 1e-5, dtype: Any = None, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self._add("weight", normalized_shape, dtype=dtype, device=device)

    def forward(self, inp: Tensor) -> Tensor:
        self._start(inp)
        return _rms_norm(inp, self.weight, self.eps)


class LayerNormMLP(_Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float = 1e-5,
        return_bias: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        params_dtype: Any = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps, self.return_bias, self.use_bias = eps, return_bias, bias
        self.normalization, self.activation = normalization, activation
        made = {"dtype": params_dtype, "device": device}
        self._add("layer_norm_weight", hidden_size, **made)
        if normalization == "LayerNorm":
            self._add("layer_norm_bias", hidden_size, **made)
        self._add("fc1_weight", ffn_hidden_size, hidden_size, **made)
        self._add("fc2_weight", hidden_size, ffn_hidden_size, **made)
        if bias:
            self._add("fc1_bias", ffn_hidden_size, **made)
            self._add("fc2_bias", hidden_size, **made)

    def forward(self, inp: Tensor) -> Any:
        self._start(inp)
        if self.normalization == "LayerNorm":
            x = _layer_norm(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            x = _rms_norm(inp, self.layer_norm_weight, self.eps)
        x = _ACTIVATIONS[self.activation](F.linear(x, self.fc1_weight, self.fc1_bias if self.use_bias else None))
        x = F.linear(x, self.fc2_weight, self.fc2_bias if self.use_bias and not self.return_bias else None)
        return (x, self.fc2_bias) if self.return_bias else x


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert qkv_format == "bshd" and attn_mask_type == "causal" and attention_dropout == 0.0
        self.repeat = num_attention_heads // (num_gqa_groups or num_attention_heads)
        self.window = -1 if window_size is None else window_size[0]
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor) -> Tensor:
        self._start(query_layer)
        k, v = (one.repeat_interleave(self.repeat, dim=2) for one in (key_layer, value_layer))
        scores = torch.einsum("bqnd,bknd->bnqk", query_layer, k) * self.scale
        s = scores.shape[-1]
        distance = torch.arange(s)[:, None] - torch.arange(s)
        hidden = (distance < 0) | ((distance > self.window) if self.window >= 0 else False)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,bknd->bqnd", weights, v).flatten(2)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def gelu_of_the_kernels(x: Tensor) -> Tensor:
    """The tanh form: x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


_ACTIVATIONS = {
    "gelu": gelu_of_the_kernels,
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": lambda x: x * torch.sigmoid(x),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@contextmanager
def autocast(*, enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
    REGIONS.append({"enabled": enabled, "recipe": recipe, "group": amax_reduction_group})
    _ran_in_region.append(set())
    try:
        yield
    finally:
        _ran_in_region.pop()


def is_fp8_available(return_reason: bool = False) -> Any:
    found = FP8["available"]
    return (found, "" if found else "Device compute capability 8.9 or higher required") if return_reason else found


def modules() -> dict[str, ModuleType]:
    """What `sys.modules` needs so that `import transformer_engine.pytorch` finds this file."""
    package, common, recipe = (
        ModuleType(name)
        for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe")
    )
    engine = sys.modules[__name__]
    recipe.DelayedScaling, recipe.Format = DelayedScaling, Format  # type: ignore[attr-defined]
    package.pytorch, package.common, common.recipe = engine, common, recipe  # type: ignore[attr-defined]
    return {
        "transformer_engine": package,
        "transformer_engine.pytorch": engine,
        "transformer_engine.common": common,
        "transformer_engine.common.recipe": recipe,
    }


def install(monkeypatch: Any = None) -> None:
    """Make this file `transformer_engine`, on the CPU: until the test's end, or in a process of its own for good."""
    CALLS.clear(), REGIONS.clear()
    FP8["available"] = True
    if monkeypatch is None:
        sys.modules.update(modules())
        transformer_engine.DEVICES = ("cpu",)
        return
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(transformer_engine, "DEVICES", ("cpu",))
