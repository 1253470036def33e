"""Norm, clip, skip and step: the one place where gradients become an update.

DeepSpeed keeps the accumulated gradients in four places, depending on the optimizer it wraps. A
`Gradients` object hides which: it lists the local pieces, says which of them this rank counts in the
global norm, and applies a clip coefficient. DeepSpeed's own norm is wrong at ZeRO-0 with pipeline or
tensor parallelism (replicated and tied parameters counted twice or not at all), so its clipping is
always off and `clip_and_step` does the work instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.sharding import is_owned, spec_of, sum_owned
from megatron.mpu.state import ParallelState

# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ and Megatron do.
CLIP_EPSILON = 1e-6


class Gradients(Protocol):
    """Where one kind of optimizer keeps the gradients of a whole step."""

    partitioned: bool  # True when each data-parallel rank holds only its own part

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        """The local gradient pieces (accumulation dtype), each with the parameter it belongs to."""
        ...

    def step(self, skip: bool) -> None:
        """Apply the update (or drop the gradients when `skip`), then clear the gradients."""
        ...


class PlainGradients:
    """fp32 without ZeRO: gradients are `p.grad`, the optimizer is a bare torch optimizer."""

    partitioned = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield p.grad, p

    def step(self, skip: bool) -> None:
        if not skip:
            self.optimizer.step()
        # set_to_none: the next backward writes instead of adding, which saves a pass over every gradient.
        self.optimizer.zero_grad(set_to_none=True)


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

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        groups = self.optimizer.fp16_groups if self.stage == 3 else self.optimizer.params_in_partition
        for i, params in enumerate(groups):
            gradients = self.optimizer.averaged_gradients.get(i) or []
            real = [g for g in gradients if not getattr(g, "_zero_padding", False)]
            # A rank whose partition holds no parameter keeps one zero buffer and no parameter.
            yield from zip(real, params, strict=False)

    def step(self, skip: bool) -> None:
        if not skip:
            self.optimizer.step()
        else:
            for i in list(self.optimizer.averaged_gradients):
                self.optimizer.averaged_gradients[i] = None
            if self.stage < 3:
                self.optimizer._release_preflattened_grad_buffers()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Update:
    """What happened at the end of a step.

    Attributes:
        norm: global L2 norm of the gradient before clipping, 0-dim fp32 on the device.
        skipped: the gradient was not finite and the weights were left alone.
    """

    norm: Tensor
    skipped: bool


@torch.no_grad()
def global_norm(gradients: Gradients, state: ParallelState) -> Tensor:
    """L2 norm of the whole model's gradient, every parameter counted once. Returns a 0-dim fp32 tensor.

    Replicated parameters are counted on tensor-parallel rank 0, tied copies on the first stage only, experts where they
    are.
    """
    # In fp32 whatever the type of the gradients: the norm of finite fp16 gradients may lie beyond fp16.
    owned = [g for g, p in gradients.pieces() if is_owned(spec_of(p), state)]
    if owned:
        squares = torch.stack(torch._foreach_norm(owned, 2, dtype=torch.float32)).square().sum()
    else:
        squares = torch.zeros((), device=state.device)
    sum_owned(squares, state)
    if gradients.partitioned and (group := state.group("data")) is not None:
        torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt()


@torch.no_grad()
def clip_and_step(
    gradients: Gradients,
    state: ParallelState,
    *,
    max_norm: float,
    loss_scale: float = 1.0,
    optimizer_skips: bool = False,
    before_update: Callable[[], None] | None = None,
) -> Update:
    """Clip to `max_norm` (0 = off) and step, or skip the step when the norm is not finite.

    Args:
        loss_scale: what the gradients are multiplied by at this moment (fp16).
        optimizer_skips: the optimizer must see the overflow itself, because it also owns the loss scale (fp16).
        before_update: called with the gradients complete and not yet clipped.
    """
    if before_update is not None:
        before_update()
    norm = global_norm(gradients, state) / loss_scale
    skip = not bool(torch.isfinite(norm))
    if not skip and max_norm > 0:
        coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        scale_by(gradients.pieces(), coefficient)
    gradients.step(skip and not optimizer_skips)
    return Update(norm, skip)


def scale_by(pieces: Iterable[tuple[Tensor, Parameter]], coefficient: Tensor) -> None:
    """Multiply every gradient piece by a 0-dim tensor, in place, without reading it on the host."""
    tensors = [g for g, _ in pieces]
    if tensors:
        torch._foreach_mul_(tensors, coefficient)
