"""A step with scaled gradients, or none, as a tensor on the device says: nobody waits for it where a kernel can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def scaled_step(optimizer: Optimizer, scale: Tensor | None, found_inf: Tensor) -> None:
    """Step with the gradients x `scale`, unless `found_inf`: then weights, moments and update count stay as they are.

    torch's fused optimizers read both in their kernel. For others the host does: it waits for the device, once. The
    gradients are not the same afterwards.

    Args:
        scale: 0-dim fp32; None = 1.
        found_inf: 0-dim fp32, 0 or 1.
    """
    if scales_in_kernel(optimizer):
        with kernel_scaling(optimizer, scale, found_inf):
            optimizer.step()
    elif not bool(found_inf):
        scale_by((p.grad for group in optimizer.param_groups for p in group["params"]), scale)
        optimizer.step()


def scales_in_kernel(optimizer: Optimizer) -> bool:
    """Whether its kernel reads scale and `found_inf` by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def kernel_scaling(optimizer: Optimizer, scale: Tensor | None, found_inf: Tensor) -> Iterator[None]:
    """In here the steps of an optimizer that `scales_in_kernel` are scaled, or none."""
    fused: object = optimizer  # torch sets these attributes from outside as well (amp.GradScaler)
    fused.grad_scale = None if scale is None else scale.reciprocal()  # type: ignore[attr-defined]
    fused.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del fused.grad_scale, fused.found_inf  # type: ignore[attr-defined]


def scale_by(gradients: Iterable[Tensor | None], scale: Tensor | None) -> None:
    """Multiply gradients by a 0-dim tensor (None = 1), in place, without reading it on the host."""
    tensors = [g for g in gradients if g is not None]
    if tensors and scale is not None:
        torch._foreach_mul_(tensors, scale.to(tensors[0].device))  # offloaded ones are in the host's memory
