"""Norm, clip, skip and step: the one place where gradients become an update.

DeepSpeed's own norm is wrong at ZeRO-0 with pipeline or tensor parallelism (replicated and tied parameters are counted
twice or not at all), so its clipping is always off and `clip_and_step` does the work instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.mpu.owned import is_owned, sum_owned
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.training.engine_gradients import Gradients
from megatron.training.outliers import Outliers

# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ and Megatron do.
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Update:
    """What happened at the end of a step.

    Attributes:
        norm: global L2 norm of the gradient before clipping, 0-dim fp32 on the device.
        skipped: the gradient was not finite, or the step is an outlier, and the weights were left alone; 0-dim bool on
            the device.
        outlier: it was the latter; None where nobody looks for outliers.
    """

    norm: Tensor
    skipped: Tensor
    outlier: Tensor | None = None


@torch.no_grad()
def global_norm(gradients: Gradients, state: ParallelState) -> Tensor:
    """L2 norm of the whole model's gradient, every parameter counted once; 0-dim fp32.

    Replicated parameters are counted on tensor-parallel rank 0, tied copies on the first stage only, experts where they
    are.
    """
    owned = [g for g, p in gradients.pieces() if is_owned(spec_of(p), state, gradients.partitioned)]
    if gradients.fixed_point is not None:
        return gradients.fixed_point.norm(owned, state)
    return joint_norm(owned, gradients.partitioned, state)


@torch.no_grad()
def joint_norm(owned: list[Tensor], partitioned: bool, state: ParallelState) -> Tensor:
    """L2 norm of the tensors that ranks count, each its own, 0-dim fp32. Collective, see `sum_owned`."""
    if owned:
        # In fp32 whatever their type: the norm of finite fp16 gradients may lie beyond fp16.
        squares = torch.stack(torch._foreach_norm(owned, 2, dtype=torch.float32)).square().sum().to(state.device)
    else:
        squares = torch.zeros((), device=state.device)
    return sum_owned(squares, state, partitioned).sqrt()


@torch.no_grad()
def clip_and_step(
    gradients: Gradients,
    state: ParallelState,
    *,
    max_norm: float,
    loss_scale: float = 1.0,
    loss: Tensor | None = None,
    outliers: Outliers | None = None,
    before_update: Callable[[], None] | None = None,
) -> Update:
    """Clip to `max_norm` (0 = off) and step, or skip the step when the norm is not finite or the step is one of the
    `outliers`. Decided on the device: the host waits for it only where the optimizer needs the answer
    (`Gradients.step`).

    Args:
        loss_scale: what the gradients are multiplied by at this moment (fp16).
        loss: of the step, 0-dim, for `outliers`.
        before_update: called with the gradients complete and not yet clipped.
    """
    if before_update is not None:
        before_update()
    norm = global_norm(gradients, state) / loss_scale
    overflow = skipped = ~torch.isfinite(norm)
    outlier = None
    if outliers is not None and loss is not None:
        outlier = outliers.judge(loss, norm)
        skipped = overflow | outlier
    scale = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0) if max_norm > 0 else None
    gradients.step(scale, skipped.to(norm.dtype), overflow)
    return Update(norm, skipped, outlier)
