"""What checkpoints and callbacks ask an engine for: parameters, gradients and optimizer state by canonical name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.owned import gather_experts, own_experts
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.training.engine_gradients import Gradients
from megatron.training.engine_state import OptimizerState
from megatron.training.l2_norms import all_names, named_norms

# What a dynamic loss scale remembers (DeepSpeed's DynamicLossScaler); a fixed one has the first only.
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class StateByName:
    """The half of `DeepSpeedEngine` (which sets these attributes) that does not step."""

    state: ParallelState
    deepspeed: Any
    precision: str
    skipped_steps: int = 0
    beat: Callable[[], None]
    _params: dict[str, Parameter]
    _gradients: Gradients
    _optimizer_state: OptimizerState
    _names: list[str] | None = None

    def _loss_scale(self) -> float | None:
        if self.precision != "fp16":
            return None
        return float(self.deepspeed.optimizer.loss_scaler.cur_scale)

    def params(self) -> dict[str, Parameter]:
        """This stage's parameters (tensor-parallel shards) by canonical name."""
        return self._params

    def grads(self) -> dict[str, Tensor]:
        """Local gradient pieces by canonical name; only valid inside `before_update`."""
        return {spec_of(p).key: g for g, p in self._gradients.pieces()}

    def grad_norms(self) -> dict[str, Tensor]:
        """L2 norm of each gradient of the whole model, unclipped; only in `before_update`. Collective, all ranks."""
        partitioned, scale = self._gradients.partitioned, self._loss_scale() or 1.0
        norms = named_norms(self._gradients.pieces(), self._all_names(), self.state, partitioned=partitioned)
        return {name: norm / scale for name, norm in norms.items()}

    def param_norms(self) -> dict[str, Tensor]:
        """L2 norm of each weight of the whole model. Collective over all ranks."""
        pieces = [(getattr(p, "ds_tensor", p), p) for p in self._params.values()]
        partitioned = any(hasattr(p, "ds_tensor") for p in self._params.values())  # ZeRO-3
        return named_norms(pieces, self._all_names(), self.state, partitioned=partitioned)

    def not_finite(self) -> list[str]:
        """Names of this rank's parameters in whose part here a weight is not finite. One pass over the weights."""
        pieces = {name: getattr(p, "ds_tensor", p).detach() for name, p in self._params.items()}
        pieces = {name: piece for name, piece in pieces.items() if piece.numel()}
        if not pieces:
            return []
        # The smallest and the largest: NaN if there is one, and on a CPU 20 times faster than isfinite in bf16.
        ends = torch.stack([torch.stack(torch.aminmax(piece)).float() for piece in pieces.values()])
        return [name for name, fine in zip(pieces, ends.isfinite().all(dim=1).tolist(), strict=True) if not fine]

    def _all_names(self) -> list[str]:
        if self._names is None:
            self._names = all_names(self._params, self.state)
        return self._names

    def read(self, name: str, needed: bool = True) -> dict[str, Tensor]:
        """fp32 master weight and optimizer moments of a parameter: this rank's tensor-parallel part, experts of all
        expert-parallel ranks. Collective over the data group; empty on ranks on which it is not `needed`."""
        self.beat()
        p, found = self._params[name], {}
        for key, value in self._optimizer_state.read(p).items():
            found[key] = gather_experts(value, spec_of(p), self.state, needed)
        return found if needed else {}

    def moments(self) -> set[str]:
        """Names of what the optimizer keeps for each element of a parameter, as `read` and `write` have them."""
        if not self._optimizer_state.keys():
            self._optimizer_state.materialize()
        return set(self._optimizer_state.keys())

    def write(self, name: str, values: dict[str, Tensor]) -> None:
        """Set what `read` gave. Call on every data rank with the same values, then `finish_writing` once."""
        if set(values) - {"weight"} and not self._optimizer_state.keys():
            self._optimizer_state.materialize()
        self.beat()
        p = self._params[name]
        mine = {key: own_experts(value, spec_of(p), self.state) for key, value in values.items()}
        self._optimizer_state.write(p, mine)

    def write_weight(self, name: str, weight: Tensor) -> None:
        """Set a weight (and its master), leaving the optimizer's moments alone."""
        p = self._params[name]
        self._optimizer_state.write_weight(p, own_experts(weight, spec_of(p), self.state))

    def finish_writing(self) -> None:
        """Bring model weights in line with the masters after the last `write`."""
        self._optimizer_state.publish()

    def scalars(self) -> dict[str, Any]:
        """The rest of the optimizer's state: update count, skipped steps, fp16 loss scale."""
        return {
            "optimizer_steps": self._optimizer_state.steps(),
            "skipped_steps": self.skipped_steps,
            "loss_scale": self._loss_scale(),
            "loss_scaler": self._loss_scaler_state(),
        }

    def _loss_scaler_state(self) -> dict[str, Any]:
        scaler = self.deepspeed.optimizer.loss_scaler if self.precision == "fp16" else None
        return {name: getattr(scaler, name) for name in _SCALER_STATE if hasattr(scaler, name)}

    def load_scalars(self, values: dict[str, Any]) -> None:
        self._optimizer_state.set_steps(values["optimizer_steps"])
        self.skipped_steps = values["skipped_steps"]
        if self.precision == "fp16":
            for name, value in values.get("loss_scaler", {}).items():
                setattr(self.deepspeed.optimizer.loss_scaler, name, value)
