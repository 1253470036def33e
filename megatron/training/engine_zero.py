"""Where DeepSpeed's ZeRO optimizers keep the accumulated gradients of a step, and what is taken out of their step.

They would look for overflow, compute a norm (of each group of parameters, with a collective over the pipeline: stages
with other groups would wait for each other forever) and scale by a factor, each in a pass over all gradients: all of
which `engine_update` has done or decided when they step. They keep the dynamic loss scale of fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.optim.scaled_step import kernel_scaling, scale_by, scales_in_kernel
from megatron.training.native.fixed_point import FixedPointSums


class ZeroGradients:
    """ZeRO stages 1-3 (DeepSpeedZeroOptimizer and its stage 3 sibling): each data rank holds its partition."""

    partitioned = True
    fixed_point: FixedPointSums | None = None

    def __init__(self, optimizer: Any, stage: int) -> None:
        self.optimizer = optimizer
        self.stage = stage
        self.offloaded = bool(optimizer.offload_optimizer if stage == 3 else optimizer.cpu_offload)
        self._scale: Tensor | None = None  # of the gradients, when the optimizer's kernel does not do it
        self._overflow = self._lowers_scale = False
        update_scale = optimizer._update_scale
        optimizer._update_scale = lambda dropped: update_scale(self._lowers_scale)
        optimizer.unscale_and_clip_grads = self._scale_flat
        if stage == 3:
            optimizer.check_overflow = lambda: None
            # It is not finite where the step is to be dropped.
            optimizer._get_norm_groups = lambda: [torch.tensor(torch.inf if self._overflow else 0.0)]
        else:
            optimizer.compute_grad_norm, optimizer.check_grad_overflow = False, True
            optimizer.check_overflow = self._tell_overflow

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

    def _tell_overflow(self, partition_gradients: bool = True) -> None:
        self.optimizer.overflow = self._overflow

    def _scale_flat(self, of: Any, norm: Any) -> None:
        """`of`: in stage 3 the number of a sub-group, else flat gradients; in the type of the masters by now."""
        flat = [self.optimizer.fp32_partitioned_groups_flat[of].grad] if self.stage == 3 else of
        scale_by(flat, self._scale)

    def step(self, scale: Tensor | None, found_inf: Tensor, overflow: Tensor) -> None:
        outer, inner = self.optimizer, self.optimizer.optimizer
        if outer.loss_scale != 1.0:  # read before the step, which may change it
            scale = (torch.ones_like(found_inf) if scale is None else scale) / outer.loss_scale
        in_kernel = scales_in_kernel(inner) and not self.offloaded
        self._scale = None if in_kernel else scale
        # The loss scale is a number of the host: it waits.
        self._overflow = bool(found_inf) if outer.dynamic_loss_scale or not in_kernel else False
        self._lowers_scale = self._overflow and bool(overflow)
        with kernel_scaling(inner, scale, found_inf) if in_kernel else nullcontext():
            outer.step()
        if self._overflow:  # offloaded ones would be added to the next step's
            outer.averaged_gradients.clear()
        outer.zero_grad(set_to_none=True)
