"""One optimizer step of one data-parallel rank's batch, through DeepSpeed.

It drives both of DeepSpeed's engines: the pipeline engine when the model is cut into stages, the plain one otherwise.

Shapes: `g` micro-batches of a step (gradient accumulation), `b` micro-batch, `s` sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.data.batch import StepBatch
from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.model.head import Then
from megatron.model.sequential import run_stage
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.training.compile import without_compile
from megatron.training.engine import StepOut
from megatron.training.engine_by_name import StateByName
from megatron.training.engine_experts import expert_parallel
from megatron.training.engine_fp32 import keep_in_fp32
from megatron.training.engine_gradients import find_gradients
from megatron.training.engine_state import OptimizerState
from megatron.training.engine_update import Update, clip_and_step
from megatron.training.engine_zero import ZeroGradients


class DeepSpeedEngine(StateByName):
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
        self.joint_passes = stage == 3
        self.before_update: Callable[[], None] | None = None
        self.beat: Callable[[], None] = lambda: None
        self.votes: Callable[[], Sequence[bool]] = tuple
        self._votes: tuple[bool, ...] = ()
        extra = {} if self.pipelined or grid is None else {"mpu": grid}
        fp32 = keep_in_fp32(model.parameters(), stage)
        with fp32, expert_parallel(model.parameters(), state) as has_experts:
            self.deepspeed, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False, **extra
            )
        # From here on DeepSpeed reduces the gradients of experts apart from the others.
        self.deepspeed.has_moe_layers = has_experts
        self.module = self.deepspeed.module
        self.micro_batches = config["gradient_accumulation_steps"]
        masters = stage > 0 or precision != "fp32"
        self._optimizer_state = OptimizerState(self.deepspeed, stage, masters)
        self._gradients = find_gradients(self.deepspeed.optimizer, stage)
        self._params = dict(named_parameters(self.module))
        if precision == "fp16":
            # DeepSpeed would end the run at the smallest scale; `max_skipped_steps` decides that, with its exit code.
            self.deepspeed.optimizer.loss_scaler.raise_error_at_min_scale = False
        self._update: Update | None = None
        self.deepspeed._take_model_step = self._take_model_step
        if self.pipelined and state.is_last_stage:
            self._announce_backward()
        if state.dp_size == 1:
            # A world of one has nothing to reduce; DeepSpeed would flatten, scale and copy back every gradient.
            self._switch_off_reduction(stage)

    def _announce_backward(self) -> None:
        """Let DeepSpeed know when a backward pass begins on the last stage.

        It hangs what comes before one (bf16: forgetting the micro-batch before, which is in the fp32 sum already) on
        the tensors that forward returned, and finds none in an `LMOutput`.
        """
        loss_of = self.module.loss_fn

        def announce_backward(out: Any, labels: Any) -> Tensor:
            loss = loss_of(out, labels)
            if loss.requires_grad:
                loss.register_hook(lambda gradient: self.deepspeed._backward_prologue())
            return loss

        self.module.loss_fn = announce_backward

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
        trained, padding, *votes = self._counts(batch, self.votes())
        self._votes = tuple(count > 0 for count in votes)
        if trained == 0:
            # Decided before any forward: a mean over nothing would be NaN.
            return StepOut(torch.zeros((), device=self.state.device), None, True, 0, self._loss_scale(), padding)
        self._set_lr(lr)
        self._update = None
        micro_batches = self._micro_batches(batch, weight=self.micro_batches * self.state.dp_size / trained)
        if self.pipelined:
            loss = self.deepspeed.train_batch(data_iter=micro_batches)
        else:
            loss = self._train_plain(micro_batches)
        update = self._update
        assert update is not None, "DeepSpeed finished a step without taking it"
        self.skipped_steps += update.skipped
        scale = self._loss_scale()
        return StepOut(loss.detach(), update.norm, update.skipped, trained, scale, padding, update.votes)

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

    # -- a forward pass of this stage's layers ------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Engine`. Afterwards the module is as it was."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), without_compile(self.module):
                yield
        finally:
            self.module.train(training)

    def stage_layers(self) -> Sequence[nn.Module]:
        """See `Engine`."""
        return self.module.forward_funcs if self.pipelined else list(self.module.sequential)

    def run_stage(self, carry: Carry, cache: KVCache | None, then: Then | None) -> Any:
        """See `Engine`."""
        if not self.pipelined:
            return self.deepspeed(carry.to_tensors(), cache=cache, then=then)
        return run_stage(self.stage_layers(), carry, self.module.recompute, cache, then)

    # -- what a step counts -------------------------------------------------------------------------

    def _counts(self, batch: StepBatch, votes: Sequence[bool] = ()) -> list[int]:
        """Trained tokens and padding of the global batch, and the votes: they differ per data rank, so all are added
        up over it."""
        trained = batch.mask.sum(dtype=torch.float64)
        counts = torch.cat([trained.view(1), trained.new_tensor([batch.padding, *votes])])
        if (group := self.state.group("data")) is not None:
            counts = counts.to(self.state.device)
            dist.all_reduce(counts, group=group)
        return [int(count) for count in counts.tolist()]

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
            self.beat()
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
            votes=self._votes,
        )
        self.deepspeed._step_applied = not self._update.skipped
        self.deepspeed.losses = None
        self.deepspeed.global_steps += 1
        self.deepspeed.global_samples += self.deepspeed.train_batch_size()

    def _set_lr(self, lr: float) -> None:
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
