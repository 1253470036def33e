"""Normalisation over the hidden dimension.

Legend: t = b·s tokens, h hidden, /tp = this rank's part. A norm maps [..., h] to [..., h] in the dtype of its input.

Norm weights are replicated. Under sequence parallelism each rank normalises its own tokens, so their gradients are
summed over tensor-parallel ranks (`region="sequence"`); a norm over the head dimension sees this rank's heads only
(`region="tensor"`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from megatron.layers.measure import size_of
from megatron.mpu import sharding
from megatron.mpu.collectives import sum_gradient
from megatron.mpu.sharding import InitFunction, ParamSpec
from megatron.mpu.state import ParallelState
from megatron.registry import Registry, import_entries

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
    fields=("vectors", "numbers"),
    measure=lambda name, model, width: size_of(lambda state: NORMS[name](width, eps=1e-5, state=state)),
)
"""Classes of norms. An entry is a subclass of `Norm`:

* it is made as `entry(width, eps=, state=, region=)`, `eps` being the value of the key `entry.epsilon_key`;
* `forward(x [..., width])` gives the same shape and type, whatever the type;
* weights are made by `self._vector(size, fill)` and read through `self._shared(weight)`, which sums their gradients
  over tensor-parallel ranks where each sees other tokens or heads only;
* it depends on nothing but x, so that it is one graph for torch.compile;
* its row counts its parameters: `vectors=` of the width and `numbers=` whatever the width (a plugin may leave both out,
  then they are counted).
"""


def build_norm(
    model: ModelConfig,
    state: ParallelState,
    *,
    width: int | None = None,
    region: Region = "sequence",
    eps: float | None = None,
) -> Norm:
    """The norm the config names, over `width` (default hidden_size), with the epsilon key that belongs to it (or
    `eps`)."""
    kind = NORMS[f"te_{model.norm}" if model.te_norm else model.norm]
    width = model.hidden_size if width is None else width
    return kind(width, eps=getattr(model, kind.epsilon_key) if eps is None else eps, state=state, region=region)


def build_rms_norm(model: ModelConfig, state: ParallelState, *, width: int, region: Region = "sequence") -> Norm:
    """An RMSNorm, whatever `norm` is: with weights around 0 where the config's norms have them, else around 1."""
    kind = "rmsnorm_unit_offset" if model.norm == "rmsnorm_unit_offset" else "rmsnorm"
    return NORMS[kind](width, eps=model.rms_norm_epsilon, state=state, region=region)


import_entries(__name__, __path__)
