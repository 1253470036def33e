"""What checkpoints and callbacks ask an engine for: parameters, gradients and optimizer state by canonical name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.log import get_logger
from megatron.mpu.owned import is_owned
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.optim.ema import EMA, EVALUATED, REFERENCE, WeightAverage, exchange
from megatron.training.engine_gradients import Gradients
from megatron.training.engine_state import WEIGHT, OptimizerState
from megatron.training.engine_update import joint_norm
from megatron.training.l2_norms import all_names, named_norms
from megatron.training.outliers import Outliers

logger = get_logger(__name__)

# What a dynamic loss scale remembers (DeepSpeed's DynamicLossScaler); a fixed one has the first only.
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class StateByName:
    """The half of an engine (which sets these attributes) that does not step."""

    state: ParallelState
    deepspeed: Any
    precision: str
    skipped_steps: int | Tensor = 0  # 0-dim on the device after a step
    beat: Callable[[], None]
    outliers: Outliers | None
    average: WeightAverage | None = None
    reference: dict[str, Tensor] | None = None  # of the elements that this rank answers for, 1-D, fp32
    _await_weights: Callable[[], None]  # of the last update, that other ranks send
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
        self._await_weights()
        return self._params

    def grads(self) -> dict[str, Tensor]:
        """Local gradient pieces by canonical name; only valid inside `before_update`."""
        return {spec_of(p).key: g for g, p in self._gradients.pieces()}

    def norm_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """See `Engine`."""
        partitioned = self._gradients.partitioned
        rows = zip(pieces, self._gradients.pieces(), strict=True)
        owned = [piece for piece, (_, p) in rows if is_owned(spec_of(p), self.state, partitioned)]
        return joint_norm(owned, partitioned, self.state)

    @torch.no_grad()
    def update_ratios(self) -> Callable[[], dict[str, Tensor]]:
        """See `Engine`."""
        state, names = self.state, self.all_names()

        def masters() -> Iterator[tuple[Tensor, Parameter]]:
            for p in self._params.values():
                yield self._optimizer_state.read(p, self._share(p))[WEIGHT], p

        before = [master.clone() for master, _ in masters()]

        @torch.no_grad()
        def ratios() -> dict[str, Tensor]:
            moved = ((master - old, p) for old, (master, p) in zip(before, masters(), strict=True))
            changes = named_norms(moved, names, state, partitioned=True)
            weights = named_norms(masters(), names, state, partitioned=True)
            return {name: (change / weights[name]).nan_to_num(0.0) for name, change in changes.items()}

        return ratios

    def grad_norms(self) -> dict[str, Tensor]:
        """L2 norm of each gradient of the whole model, unclipped; only in `before_update`. Collective, all ranks."""
        partitioned, scale = self._gradients.partitioned, self._loss_scale() or 1.0
        norms = named_norms(self._gradients.pieces(), self.all_names(), self.state, partitioned=partitioned)
        return {name: norm / scale for name, norm in norms.items()}

    def param_norms(self) -> dict[str, Tensor]:
        """L2 norm of each weight of the whole model. Collective over all ranks."""
        pieces = [(getattr(p, "ds_tensor", p), p) for p in self.params().values()]
        partitioned = any(hasattr(p, "ds_tensor") for p in self._params.values())  # ZeRO-3
        return named_norms(pieces, self.all_names(), self.state, partitioned=partitioned)

    def not_finite(self) -> list[str]:
        """Names of this rank's parameters in whose part here a weight is not finite. One pass over the weights."""
        pieces = {name: getattr(p, "ds_tensor", p).detach() for name, p in self.params().items()}
        pieces = {name: piece for name, piece in pieces.items() if piece.numel()}
        if not pieces:
            return []
        # The smallest and the largest: NaN if there is one, and on a CPU 20 times faster than isfinite in bf16.
        ends = torch.stack([torch.stack(torch.aminmax(piece)).float() for piece in pieces.values()])
        return [name for name, fine in zip(pieces, ends.isfinite().all(dim=1).tolist(), strict=True) if not fine]

    def all_names(self) -> list[str]:
        """See `Engine`."""
        if self._names is None:
            self._names = all_names(self._params, self.state)
        return self._names

    def share(self, name: str) -> range:
        """See `Engine`."""
        p = self._params[name]
        before = self.state.ep_rank * p.numel() if self._has_own_experts(p) else 0
        share = self._share(p)
        return range(before + share.start, before + share.stop)

    def read_share(self, name: str) -> dict[str, Tensor]:
        """See `Engine`."""
        self.beat()
        p = self._params[name]
        found = self._optimizer_state.read(p, self._share(p))
        if self.average is not None and name in self.average.means:
            found[EMA] = self.average.means[name]
        elif (evaluated := self._optimizer_state.evaluated(found)) is not None:
            found[EVALUATED] = evaluated
        if self.reference is not None and name in self.reference:
            found[REFERENCE] = self.reference[name]
        return found

    def moments(self) -> set[str]:
        """See `Engine`."""
        if not self._optimizer_state.moments():
            self._optimizer_state.materialize()
        return self._optimizer_state.moments()

    def write_share(self, name: str, values: dict[str, Tensor]) -> None:
        """See `Engine`."""
        self.beat()
        if set(values) - {WEIGHT, EMA, REFERENCE} and not self._optimizer_state.moments():
            self._optimizer_state.materialize()
        p = self.params()[name]
        self._optimizer_state.write(p, self._share(p), values)
        if self.average is not None:
            self.average.load(name, values)
        if self.reference is not None and name in self.reference and values:
            begun = self._optimizer_state.master(p, self._share(p))
            self.reference[name].copy_(values.get(REFERENCE, begun))

    def finish_writing(self) -> None:
        """See `Engine`."""
        replicated = []
        for p in self._params.values():
            group = self.state.group("expert_data" if self._has_own_experts(p) else "data")
            if group is not None and self._optimizer_state.is_replicated(p):
                replicated.append((p, group))
        self._optimizer_state.publish(replicated)
        if self.average is not None and self.average.begun:
            self.average.begun.clear()
            logger.info("what was loaded has no average of the weights (ema_decay): it begins with these weights")

    def keep_average(self, decay: float) -> None:
        """From now on keep the moving average of the weights that are trained."""
        self.average = WeightAverage(decay, self._trained())

    def _trained(self) -> dict[str, Tensor]:
        """The masters of this rank's elements of what is trained."""
        trained = {name: p for name, p in self.params().items() if p.requires_grad}
        return {name: self._optimizer_state.master(p, self._share(p)) for name, p in trained.items()}

    def keep_reference(self) -> None:
        """See `Engine`."""
        self.reference = {name: master.detach().clone() for name, master in self._trained().items()}

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """See `Engine`."""
        assert self.reference is not None, "no reference is kept"
        self._exchange(self.reference)
        yield
        self._exchange(self.reference)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """See `Engine`. An error in here ends the run: other ranks may not be there to bring the weights back."""
        if self.average is None and not self._optimizer_state.averages:
            yield
            return
        averages = self._evaluated() if self.average is None else self.average.means
        self._exchange(averages)
        yield
        self._exchange(averages)

    def _evaluated(self) -> dict[str, Tensor]:
        """What the optimizer makes of weights and state, by name."""
        found = {}
        for name, p in self._params.items():
            evaluated = self._optimizer_state.evaluated(self._optimizer_state.read(p, self._share(p)))
            if evaluated is not None:
                found[name] = evaluated
        return found

    def _exchange(self, averages: Mapping[str, Tensor]) -> None:
        self._await_weights()
        masters = {name: self._optimizer_state.master(p, self._share(p)) for name, p in self._params.items()}
        exchange(masters, averages)
        self.finish_writing()
        self._await_weights()

    def _has_own_experts(self, p: Parameter) -> bool:
        return spec_of(p).experts and self.state.ep_size > 1

    def _share(self, p: Parameter) -> range:
        """The elements that this rank answers for, counted from the first one that it holds."""
        share_experts = self.state.ep_size if self._has_own_experts(p) else 1
        return self._optimizer_state.share(p, self.state.dp_rank // share_experts, self.state.dp_size // share_experts)

    def scalars(self) -> dict[str, Any]:
        """The rest of the optimizer's state: update count, skipped steps, fp16 loss scale, window of outliers."""
        found = {
            "optimizer_steps": self._optimizer_state.steps(),
            "skipped_steps": int(self.skipped_steps),
            "loss_scale": self._loss_scale(),
            "loss_scaler": self._loss_scaler_state(),
        }
        if counters := self._optimizer_state.counters():
            found["optimizer_counters"] = counters
        return found if self.outliers is None else {**found, "outliers": self.outliers.state()}

    def _loss_scaler_state(self) -> dict[str, Any]:
        scaler = self.deepspeed.optimizer.loss_scaler if self.precision == "fp16" else None
        return {name: getattr(scaler, name) for name in _SCALER_STATE if hasattr(scaler, name)}

    def load_scalars(self, values: dict[str, Any]) -> None:
        self._optimizer_state.set_steps(values["optimizer_steps"])
        self._optimizer_state.set_counters(values.get("optimizer_counters", {}))
        self.skipped_steps = values["skipped_steps"]
        if self.outliers is not None:
            self.outliers.load(values.get("outliers"))
        if self.precision == "fp16":
            for name, value in values.get("loss_scaler", {}).items():
                setattr(self.deepspeed.optimizer.loss_scaler, name, value)
