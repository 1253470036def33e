"""The engine: one optimizer step of one data-parallel rank's batch, through DeepSpeed.

`Engine` is the seam between the loop and whatever runs the step. No DeepSpeed type appears above
`training/`. `DeepSpeedEngine` drives both of DeepSpeed's engines: the pipeline engine when the model
is cut into stages, the plain one otherwise.

Shapes: `g` micro-batches of a step (gradient accumulation), `b` micro-batch, `s` sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.data.batch import StepBatch
from megatron.mpu.sharding import gather_experts, named_parameters, own_experts, spec_of
from megatron.mpu.state import ParallelState
from megatron.training.engine_experts import expert_parallel
from megatron.training.engine_fp32 import kept_in_fp32
from megatron.training.engine_state import OptimizerState
from megatron.training.engine_update import (
    Bf16Gradients,
    Gradients,
    PlainGradients,
    Update,
    ZeroGradients,
    clip_and_step,
)
from megatron.training.l2_norms import all_names, named_norms

# What a dynamic loss scale remembers (DeepSpeed's DynamicLossScaler); a fixed one has the first only.
_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepOut:
    """What one training step reports. Tensors stay on the device until somebody logs them.

    Attributes:
        loss: mean loss over the trained tokens of the global batch, 0-dim fp32, equal on every rank.
        grad_norm: global gradient norm before clipping, 0-dim fp32; None when nothing was trained.
        skipped: the update was not applied (non-finite gradient, or no trained token in the batch).
        trained_tokens: number of trained tokens of the global batch.
        loss_scale: fp16 loss scale after the step, else None.
        padding: number of inputs of the global batch that are padding.
    """

    loss: Tensor
    grad_norm: Tensor | None
    skipped: bool
    trained_tokens: int
    loss_scale: float | None = None
    padding: int = 0


class Engine(Protocol):
    """What the loop, the callbacks and the checkpoint code may ask of an engine."""

    state: ParallelState
    module: nn.Module
    before_update: Callable[[], None] | None

    def train_batch(self, batch: StepBatch, lr: float) -> StepOut: ...
    def eval_batch(self, batch: StepBatch) -> tuple[Tensor, int]: ...
    def params(self) -> dict[str, Parameter]: ...
    def grads(self) -> dict[str, Tensor]: ...
    def grad_norms(self) -> dict[str, Tensor]: ...
    def param_norms(self) -> dict[str, Tensor]: ...
    def read(self, name: str, needed: bool = True) -> dict[str, Tensor]: ...
    def write(self, name: str, values: dict[str, Tensor]) -> None: ...
    def write_weight(self, name: str, weight: Tensor) -> None: ...
    def finish_writing(self) -> None: ...
    def scalars(self) -> dict[str, Any]: ...
    def load_scalars(self, values: dict[str, Any]) -> None: ...


class DeepSpeedEngine:
    """Trains a `SequentialModel` (one stage) or `LayerPipe` (pipeline) with DeepSpeed.

    Args:
        model: the model of this rank's stage.
        optimizer: a torch optimizer over the model's parameters.
        config: what `training/engine_config` made of the YAML.
        state: this rank's place in the layout.
        stage: the ZeRO stage that runs.
        precision: "fp32", "bfloat16" or "fp16".
        max_norm: clip the global gradient norm to this; 0 = off.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        state: ParallelState,
        *,
        stage: int,
        precision: str,
        max_norm: float,
        grid: Any = None,
    ) -> None:
        self.state = state
        self.precision = precision
        self.max_norm = max_norm
        self.pipelined = state.pp_size > 1
        self.before_update: Callable[[], None] | None = None
        extra = {} if self.pipelined or grid is None else {"mpu": grid}
        kept = kept_in_fp32(model.parameters(), stage)
        with kept, expert_parallel(model.parameters(), state) as experts_apart:
            self.deepspeed, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False, **extra
            )
        # From here on DeepSpeed reduces the gradients of experts apart from the others.
        self.deepspeed.has_moe_layers = experts_apart
        self.module = self.deepspeed.module
        self.micro_batches = config["gradient_accumulation_steps"]
        masters = stage > 0 or precision != "fp32"
        self._optimizer_state = OptimizerState(self.deepspeed, stage, masters)
        self._gradients = self._find_gradients(stage)
        self._params = dict(named_parameters(self.module))
        if precision == "fp16":
            # DeepSpeed would end the run at the smallest scale; `max_skipped_steps` decides that, with its exit code.
            self.deepspeed.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._names: list[str] | None = None
        self._update: Update | None = None
        self.skipped_steps = 0
        self.deepspeed._take_model_step = self._take_model_step
        if self.pipelined and state.is_last_stage:
            self._announce_backward()
        if state.dp_size == 1:
            # A world of one has nothing to reduce; DeepSpeed would flatten, scale and copy back every gradient.
            self._switch_off_reduction(stage)

    def _find_gradients(self, stage: int) -> Gradients:
        kind = type(self.deepspeed.optimizer).__name__
        if kind == "BF16_Optimizer":
            return Bf16Gradients(self.deepspeed.optimizer)
        if stage >= 1:
            return ZeroGradients(self.deepspeed.optimizer, stage)
        return PlainGradients(self.deepspeed.optimizer)

    def _announce_backward(self) -> None:
        """Let DeepSpeed know when a backward pass begins on the last stage.

        It hangs what comes before one (bf16: forgetting the micro-batch before, which is in the fp32 sum already) on
        the tensors that forward returned, and finds none in an `LMOutput`.
        """
        loss_of = self.module.loss_fn

        def announced(out: Any, labels: Any) -> Tensor:
            loss = loss_of(out, labels)
            if loss.requires_grad:
                loss.register_hook(lambda gradient: self.deepspeed._backward_prologue())
            return loss

        self.module.loss_fn = announced

    def _switch_off_reduction(self, stage: int) -> None:
        if isinstance(self._gradients, ZeroGradients):
            return  # ZeRO's partitions are filled by its reduction, in a world of one as well
        if self.pipelined:
            self.deepspeed.pipeline_enable_backward_allreduce = False
        else:
            self.deepspeed.enable_backward_allreduce = False

    # -- one step ---------------------------------------------------------------------------------

    def train_batch(self, batch: StepBatch, lr: float) -> StepOut:
        """Forward, backward and update over a whole step. The same call on every rank.

        Args:
            batch: this data rank's share of the global batch.
            lr: learning rate of this step.
        """
        trained, padding = self._counts(batch)
        if trained == 0:
            # Decided before any forward: a mean over nothing would be NaN.
            return StepOut(torch.zeros((), device=self.state.device), None, True, 0, self._loss_scale(), padding)
        self._set_lr(lr)
        self._update = None
        micro_batches = self._micro_batches(batch, weight=self.micro_batches * self.state.dp_size / trained)
        loss = self._train_pipeline(micro_batches) if self.pipelined else self._train_plain(micro_batches)
        update = self._update
        assert update is not None, "DeepSpeed finished a step without taking it"
        self.skipped_steps += update.skipped
        return StepOut(loss.detach(), update.norm, update.skipped, trained, self._loss_scale(), padding)

    def _train_plain(self, micro_batches: Iterator[tuple[Any, Any]]) -> Tensor:
        self.module.train()
        total = torch.zeros((), device=self.state.device)
        for inputs, labels in micro_batches:
            loss = self.deepspeed(inputs, labels)
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            total += loss.detach()
        total /= self.micro_batches
        if (group := self.state.group("data")) is not None:
            dist.all_reduce(total, group=group)
            total /= self.state.dp_size
        return total

    def _train_pipeline(self, micro_batches: Iterator[tuple[Any, Any]]) -> Tensor:
        return self.deepspeed.train_batch(data_iter=micro_batches)

    def eval_batch(self, batch: StepBatch) -> tuple[Tensor, int]:
        """Summed loss over the trained tokens of the global batch (0-dim fp32, equal on every rank) and their number.

        The batch may hold another number of micro-batches than a training step.
        """
        count, (trained, _) = batch.tokens.shape[0], self._counts(batch)
        micro_batches = self._micro_batches(batch, weight=1.0)
        with torch.no_grad():
            if self.pipelined:
                # DeepSpeed averages over micro-batches and data ranks; undo it to get the sum.
                mean = self.deepspeed.eval_batch(micro_batches, num_micro_batches=count)
                return mean.detach().float() * count * self.state.dp_size, trained
            self.module.eval()
            total = torch.zeros((), device=self.state.device)
            for inputs, labels in micro_batches:
                total += self.deepspeed(inputs, labels)
            self.module.train()
            if (group := self.state.group("data")) is not None:
                dist.all_reduce(total, group=group)
        return total, trained

    def _counts(self, batch: StepBatch) -> tuple[int, int]:
        """Trained tokens and padding of the global batch: they differ per data rank, so both are added up over it."""
        trained = batch.mask.sum(dtype=torch.float64)
        counts = torch.stack([trained, trained.new_tensor(batch.padding)])
        if (group := self.state.group("data")) is not None:
            counts = counts.to(self.state.device)
            dist.all_reduce(counts, group=group)
        return int(counts[0]), int(counts[1])

    def _micro_batches(self, batch: StepBatch, weight: float) -> Iterator[tuple[tuple[Tensor, ...], Any]]:
        """The step as (inputs, labels) pairs on the device. labels = (targets, mask, weight), see objectives."""
        device = self.state.device
        on_device = {
            name: tensor.to(device, non_blocking=True)
            for name in ("tokens", "targets", "mask", "positions", "doc_ids")
            if (tensor := getattr(batch, name)) is not None
        }
        scale = torch.full((), weight, dtype=torch.float32, device=device)  # a tensor from Python waits for the device
        for i in range(batch.tokens.shape[0]):
            inputs = tuple(on_device[name][i] for name in ("tokens", "positions", "doc_ids") if name in on_device)
            yield inputs, (on_device["targets"][i], on_device["mask"][i], scale)

    # -- the update -------------------------------------------------------------------------------

    def _take_model_step(self, lr_kwargs: Any = None) -> None:
        """Stands in for DeepSpeed's method of this name, in both of its engines."""
        scale = self._loss_scale() or 1.0
        self._update = clip_and_step(
            self._gradients,
            self.state,
            max_norm=self.max_norm,
            loss_scale=scale,
            optimizer_skips=self.precision == "fp16",
            before_update=self.before_update,
        )
        self.deepspeed._step_applied = not self._update.skipped
        self.deepspeed.losses = None
        self.deepspeed.global_steps += 1
        self.deepspeed.global_samples += self.deepspeed.train_batch_size()

    def _set_lr(self, lr: float) -> None:
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)

    def _loss_scale(self) -> float | None:
        if self.precision != "fp16":
            return None
        return float(self.deepspeed.optimizer.loss_scaler.cur_scale)

    # -- state ------------------------------------------------------------------------------------

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

    def _all_names(self) -> list[str]:
        if self._names is None:
            self._names = all_names(self._params, self.state)
        return self._names

    def read(self, name: str, needed: bool = True) -> dict[str, Tensor]:
        """fp32 master weight and optimizer moments of a parameter: this rank's tensor-parallel part, experts of all
        expert-parallel ranks. Collective over the data group; nothing comes back to who says it is not `needed`."""
        p, found = self._params[name], {}
        for key, value in self._optimizer_state.read(p).items():
            found[key] = gather_experts(value, spec_of(p), self.state, needed)
        return found if needed else {}

    def write(self, name: str, values: dict[str, Tensor]) -> None:
        """Set what `read` gave. Call on every data rank with the same values, then `finish_writing` once."""
        if set(values) - {"weight"} and not self._optimizer_state.keys():
            self._optimizer_state.materialize()
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
