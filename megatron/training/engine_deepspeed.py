"""A step through DeepSpeed: its pipeline engine when the model is cut into stages, its plain one otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from megatron.data.batch import StepBatch
from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.model.head import Then
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.objectives import measured
from megatron.training.engine_bf16 import Bf16Gradients
from megatron.training.engine_config import owns_reduction
from megatron.training.engine_deepspeed_state import DeepSpeedState
from megatron.training.engine_experts import expert_parallel
from megatron.training.engine_fp32 import keep_in_fp32
from megatron.training.engine_gradients import find_gradients
from megatron.training.engine_step import StepEngine, packed_documents
from megatron.training.engine_zero import ZeroGradients
from megatron.training.partition_comm import Arrivals


class DeepSpeedEngine(StepEngine):
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
        micro_batches = config["gradient_accumulation_steps"]
        super().__init__(state, precision=precision, max_norm=max_norm, micro_batches=micro_batches)
        self.pipelined = state.pp_size > 1
        self.joint_passes = stage == 3
        extra = {} if self.pipelined or grid is None else {"mpu": grid}
        fp32 = keep_in_fp32(model.parameters(), stage)
        with fp32, expert_parallel(model.parameters(), state) as has_experts:
            self.deepspeed, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False, **extra
            )
        # From here on DeepSpeed reduces the gradients of experts apart from the others.
        self.deepspeed.has_moe_layers = has_experts
        self.module = self.deepspeed.module
        masters = stage > 0 or precision != "fp32"
        self._optimizer_state = DeepSpeedState(self.deepspeed, stage, masters)
        ranks = state.dp_size if owns_reduction(config) else None
        self._gradients = find_gradients(self.deepspeed.optimizer, stage, micro_batches, ranks)
        self._params = dict(named_parameters(self.module))
        for p in self.module.parameters():
            if not p.requires_grad:
                p._hp_grad = None  # DeepSpeed looks for it in a tied weight, frozen or not
        if precision == "fp16":
            # DeepSpeed would end the run at the smallest scale; `max_skipped_steps` decides that, with its exit code.
            self.deepspeed.optimizer.loss_scaler.raise_error_at_min_scale = False
        self.deepspeed._take_model_step = self._take_model_step
        if self.pipelined and self.deepspeed.steps_per_print() is None:
            self.deepspeed.timers = NoopTimer()  # it keeps two events of the device per step until it prints
        if self.pipelined:
            self.deepspeed._aggregate_total_loss = lambda: self._means[0]
        if self.pipelined and state.is_last_stage:
            self._measure_loss()
        if isinstance(self._gradients, Bf16Gradients):
            self._exchange_in_buckets(self._gradients)
        if state.dp_size == 1 or ranks is not None:
            # A world of one has nothing to reduce; DeepSpeed would flatten, scale and copy back every gradient.
            self._switch_off_reduction(stage)

    def _measure_loss(self) -> None:
        """Add up loss and metrics of the last stage's micro-batches, and let DeepSpeed know when a backward pass begins
        there.

        It hangs what comes before one (bf16: forgetting the micro-batch before, which is in the fp32 sum already) on
        the tensors that forward returned, and finds none in an `LMOutput`.
        """
        objective = self.objective

        def loss_of(out: Any, labels: Any) -> Tensor:
            loss, metrics = objective(out, labels)
            self._total += measured(loss, metrics)
            if loss.requires_grad:
                loss.register_hook(lambda gradient: self.deepspeed._backward_prologue())
            return loss

        self.module.loss_fn = loss_of

    def _exchange_in_buckets(self, gradients: Bf16Gradients) -> None:
        """Wait for weights and reduced gradients where they are needed."""
        arrivals = Arrivals(self.stage_layers(), gradients.buckets)
        self.module.before_layer, self._await_weights = arrivals.wait_before, arrivals.wait_for_all
        if self.pipelined:
            find_tied = self.module.get_tied_weights_and_groups

            def find_tied_when_reduced() -> Any:
                gradients.wait()
                return find_tied()

            self.module.get_tied_weights_and_groups = find_tied_when_reduced

    def _switch_off_reduction(self, stage: int) -> None:
        if isinstance(self._gradients, ZeroGradients):
            return  # ZeRO's partitions are filled by its reduction, in a world of one as well
        if self.pipelined:
            self.deepspeed.pipeline_enable_backward_allreduce = False
        else:
            self.deepspeed.enable_backward_allreduce = False

    # -- one step ---------------------------------------------------------------------------------

    def _forward_backward(self, micro_batches: Iterator[tuple[Any, Any]]) -> Tensor:
        self._total = self._no_sums()
        if self.pipelined:
            self.deepspeed.train_batch(data_iter=micro_batches)
            return self._means
        self.module.train()
        for inputs, labels in micro_batches:
            loss, metrics = self.deepspeed(inputs, labels)
            self.deepspeed.backward(loss)
            self._total += measured(loss, metrics)
            self.deepspeed.step()
        return self._means

    def _find_means(self) -> Tensor:
        """Loss and metrics of all micro-batches of the step and all data ranks, `[1 + m]`."""
        return self._over_ranks(self._total / self.micro_batches) / self.state.dp_size

    def _over_ranks(self, sums: Tensor) -> Tensor:
        """Add up, over data ranks, what the last stage has. DeepSpeed's methods of this kind copy a zero from the host
        to the device first, for which the host waits."""
        if self.state.is_last_stage:
            sums = self._sum_over_data(sums)
        if self.pipelined:
            dist.broadcast(sums, group=self.state.group("pipe"), group_src=self.state.pp_size - 1)
        return sums

    def _forward(self, inputs: Any, labels: Any) -> tuple[Tensor, Tensor]:
        return self.deepspeed(inputs, labels)

    def _micro_batches(self, batch: StepBatch, weights: Sequence[float]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        if not self.pipelined:
            return super()._micro_batches(batch, weights)
        # Every stage has the batch, and runs its micro-batches in order: hidden states alone are sent.
        batch = batch.to(self.state.device, non_blocking=True)
        known: dict[str, Sequence[Any] | Tensor] = {"positions": batch.positions}
        if documents := packed_documents(batch):
            known["documents"] = documents
        if "tokens" in self.module.carried:
            known["tokens"] = batch.tokens
        self.module.micro_batches = (dict(zip(known, one, strict=True)) for one in zip(*known.values(), strict=True))
        pairs = super()._micro_batches(batch, weights)
        return ((inputs[:1], labels) for inputs, labels in pairs)

    def _eval_sum(self, micro_batches: Iterator[tuple[Any, Any]], count: int) -> Tensor:
        if not self.pipelined:
            return super()._eval_sum(micro_batches, count)
        self._total = self._no_sums()
        self.deepspeed.eval_batch(micro_batches, num_micro_batches=count, reduce_output=None, bcast_loss=False)
        return self._over_ranks(self._total)

    def stage_layers(self) -> Sequence[nn.Module]:
        """See `Engine`."""
        return self.module.forward_funcs if self.pipelined else super().stage_layers()

    def run_stage(self, carry: Carry, cache: KVCache | None, then: Then | None) -> Any:
        """See `Engine`."""
        if not self.pipelined:
            self._await_weights()  # layers with a cache are not awaited one by one
            return self.deepspeed(carry.to_tensors(), cache=cache, then=then)
        return super().run_stage(carry, cache, then)

    def _take_model_step(self, lr_kwargs: Any = None) -> None:
        """Stands in for DeepSpeed's method of this name, in both of its engines."""
        self._means = self._find_means()  # behind the update they would wait for the weights on their way
        self._take_update(self._means[0])
        self.deepspeed.losses = None
        self.deepspeed.global_steps += 1
        self.deepspeed.global_samples += self.deepspeed.train_batch_size()

    def _set_micro_batches(self) -> None:
        count, runtime = self.micro_batches, self.deepspeed
        runtime.set_train_batch_size(count * runtime.train_micro_batch_size_per_gpu() * runtime.dp_world_size)
        runtime.micro_steps = 0  # a step ends where their number is a multiple of `count`
        if hasattr(runtime.optimizer, "gradient_accumulation_steps"):  # of ZeRO, which has a copy
            runtime.optimizer.gradient_accumulation_steps = count
        if isinstance(self._gradients, Bf16Gradients):
            self._gradients.set_passes(count)
