"""Where DeepSpeed's own optimizers keep the accumulated gradients of a step: that of bf16, and those of ZeRO.

Both are `engine_gradients.Gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class Bf16Gradients:
    """bf16 weights, fp32 masters and fp32 accumulation (DeepSpeed's BF16_Optimizer, ZeRO-1)."""

    partitioned = False  # gradients are accumulated and reduced whole; only master and moments are partitioned

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        optimizer.update_hp_grads = self.accumulate

    @torch.no_grad()
    def accumulate(self, clear_lp_grads: bool = False) -> None:
        """Stands in for DeepSpeed's method, after each backward: add the bf16 gradients to the fp32 sums.

        DeepSpeed's makes an fp32 copy of every gradient first, adds it to zeros, and keeps the bf16 gradient for the
        next backward to be added to after it is zeroed. Here the first micro-batch is written, the others are added,
        and the bf16 gradients are let go: four passes over all gradients less, and their memory.
        """
        outer = self.optimizer
        rows = zip(outer.bf16_groups, outer.fp32_groups_gradients, outer.fp32_groups_has_gradients, strict=True)
        for params, sums, started in rows:
            for i, (p, total) in enumerate(zip(params, sums, strict=True)):
                if p.grad is None:
                    if not started[i]:
                        total.zero_()  # what the step before left there
                    continue
                gradient = p.grad.reshape(total.shape)
                if started[i]:
                    total.add_(gradient)
                else:
                    total.copy_(gradient)
                started[i], p._hp_grad, p.grad = True, total, None

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        for params, gradients in zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_gradients, strict=True):
            for p, gradient in zip(params, gradients, strict=True):
                yield gradient, p

    def step(self, skip: bool) -> None:
        outer = self.optimizer
        if not skip:
            # BF16_Optimizer.step would first compute a norm of its own (one more pass over all gradients).
            for master, gradient in zip(
                outer.fp32_groups_flat_partition, outer.fp32_groups_gradient_flat_partition, strict=True
            ):
                master.grad = gradient.to(master.dtype)
            outer.optimizer.step()
            outer._lazy_init_hp_params_optimizer_state()
            outer.update_lp_params()
        outer.fp32_groups_has_gradients = [[False] * len(params) for params in outer.bf16_groups]


class ZeroGradients:
    """ZeRO stages 1-3 (DeepSpeedZeroOptimizer and its stage 3 sibling): each data rank holds its partition."""

    partitioned = True

    def __init__(self, optimizer: Any, stage: int) -> None:
        self.optimizer = optimizer
        self.stage = stage
        self.offloaded = bool(optimizer.offload_optimizer if stage == 3 else optimizer.cpu_offload)

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        if self.offloaded:
            yield from self._in_host_memory()
            return
        groups = self.optimizer.fp16_groups if self.stage == 3 else self.optimizer.params_in_partition
        for i, params in enumerate(groups):
            gradients = self.optimizer.averaged_gradients.get(i) or []
            real = [g for g in gradients if not getattr(g, "_zero_padding", False)]
            # A rank whose partition holds no parameter keeps one zero buffer and no parameter.
            yield from zip(real, params, strict=False)

    def _in_host_memory(self) -> Iterator[tuple[Tensor, Parameter]]:
        """With offload_optimizer DeepSpeed moves gradients behind the masters, which are there."""
        outer = self.optimizer
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies run beside the host
        groups, masters = (
            (outer.fp16_groups, outer.fp32_partitioned_groups_flat)
            if self.stage == 3
            else (outer.params_in_partition, outer.single_partition_of_fp32_groups)
        )
        for params, master in zip(groups, masters, strict=True):
            for p in params:
                *_, start, count = outer.grad_position[outer.get_param_id(p)]
                yield master.grad.view(-1).narrow(0, start, count), p

    def _forget_offloaded(self) -> None:
        self.optimizer.micro_step_id = -1  # the next micro-batch writes, and does not add
        if self.stage < 3:
            self.optimizer._offload_accumulated_param_ids = set()
            self.optimizer.reset_cpu_buffers()

    def step(self, skip: bool) -> None:
        if not skip:
            self.optimizer.step()
        else:
            for i in list(self.optimizer.averaged_gradients):
                self.optimizer.averaged_gradients[i] = None
            if self.stage < 3:
                self.optimizer._release_preflattened_grad_buffers()
            if self.offloaded:
                self._forget_offloaded()
        self.optimizer.zero_grad(set_to_none=True)
