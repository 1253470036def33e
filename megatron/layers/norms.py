"""Normalisation over the hidden dimension.

Legend: t = b·s tokens, h hidden, /tp = this rank's part. A norm maps [..., h] to [..., h] in the dtype of its input.

Norm weights are replicated. Under sequence parallelism each rank normalises its own tokens, so their gradients are
summed over tensor-parallel ranks (`region="sequence"`); a norm over the head dimension sees this rank's heads only
(`region="tensor"`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.layers.measure import size_of
from megatron.mpu import sharding
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel, sum_gradient
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState
from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

Region = Literal["sequence", "tensor"]


class Norm(nn.Module):
    """What all norms share: the width, epsilon and where the ranks' views differ."""

    epsilon_key = "layernorm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.state = state
        self.region: Region = region

    def _vector(self, size: int, fill: InitFunction) -> nn.Parameter:
        return sharding.parameter(ParamSpec(shape=(size,), init=fill, sequence_reduced=True), self.state)

    def _shared(self, weight: Tensor) -> Tensor:
        return sum_gradient(weight, self.state, self.region)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}"


NORMS: Registry[type[Norm]] = Registry(
    "norm",
    wants="a subclass of megatron.layers.norms.Norm",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Norm),
    measure=lambda name, model, width: size_of(lambda state: NORMS[name](width, eps=1e-5, state=state)),
)
"""Classes of norms. An entry is a subclass of `Norm`:

* it is made as `entry(width, eps=, state=, region=)`, `eps` being the value of the key `entry.epsilon_key`;
* `forward(x [..., width])` gives the same shape and type, whatever the type;
* weights are made by `self._vector(size, fill)` and read through `self._shared(weight)`, which sums their gradients
  over tensor-parallel ranks where each sees other tokens or heads only;
* it depends on nothing but x, so that it is one graph for torch.compile.
"""


def build_norm(
    model: ModelConfig, state: ParallelState, *, width: int | None = None, region: Region = "sequence"
) -> Norm:
    """The norm the config names, over `width` (default hidden_size), with the epsilon key that belongs to it."""
    kind = NORMS[model.norm]
    width = model.hidden_size if width is None else width
    return kind(width, eps=getattr(model, kind.epsilon_key), state=state, region=region)


def build_rms_norm(model: ModelConfig, state: ParallelState, *, width: int, region: Region = "sequence") -> Norm:
    """An RMSNorm, whatever `norm` is: with weights around 0 where the config's norms have them, else around 1."""
    kind = "rmsnorm_unit_offset" if model.norm == "rmsnorm_unit_offset" else "rmsnorm"
    return NORMS[kind](width, eps=model.rms_norm_epsilon, state=state, region=region)


@NORMS.register("layernorm")
class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) · weight + bias."""

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.weight = self._vector(width, sharding.ones)
        self.bias = self._vector(width, sharding.zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self._shared(self.weight), self._shared(self.bias), self.eps)


@NORMS.register("non_parametric_layernorm")
class NonParametricLayerNorm(Norm):
    """LayerNorm without weight and bias (OLMo 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), None, None, self.eps)


@NORMS.register("rmsnorm")
class RMSNorm(Norm):
    """x / sqrt(mean(x²) + eps) · scale: epsilon inside the root, as LLaMA and its conversions have it."""

    epsilon_key = "rms_norm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.scale = self._vector(width, sharding.ones)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self._shared(self.scale), self.eps)


@NORMS.register("rmsnorm_unit_offset")
class UnitOffsetRMSNorm(Norm):
    """x / sqrt(mean(x²) + eps) · (1 + scale), in fp32 up to the cast (Gemma): `scale` starts at 0, and small values of
    it keep their precision in bf16."""

    epsilon_key = "rms_norm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.scale = self._vector(width, sharding.zeros)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.width,), 1.0 + self._shared(self.scale).float(), self.eps).to(x.dtype)


@NORMS.register("scalenorm")
class ScaleNorm(Norm):
    """g · x / max(‖x‖, eps) with one learned number g (Nguyen & Salazar 2019)."""

    epsilon_key = "scalenorm_epsilon"

    def __init__(self, width: int, *, eps: float, state: ParallelState, region: Region = "sequence") -> None:
        super().__init__(width, eps=eps, state=state, region=region)
        self.g = self._vector(1, sharding.ones)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).clamp(min=self.eps)
        return (x.float() / length).to(x.dtype) * self._shared(self.g)


class SplitRMSNorm(nn.Module):
    """RMSNorm over a width that is split over tensor-parallel ranks: [t, width/tp] -> [t, width/tp].

    The mean of squares is taken over the whole width, so the result does not depend on the layout (the SLURM fork of
    GPT-NeoX normalises each rank's part by itself). `scale` [width/tp] is split like its input.
    """

    def __init__(self, width: int, *, eps: float, state: ParallelState) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.state = state
        self.scale = sharding.parameter(ParamSpec(shape=(width,), init=sharding.ones, split_dim=0), state)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1)
        # Leaving and entering is an all-reduce in both directions, with and without sequence parallelism.
        squares = enter_tensor_parallel(leave_tensor_parallel(squares, self.state), self.state)
        return (wide * torch.rsqrt(squares / self.width + self.eps).unsqueeze(-1)).to(x.dtype) * self.scale
