"""Norm, clip, skip and step: the one place where gradients become an update.

DeepSpeed's own norm is wrong at ZeRO-0 with pipeline or tensor parallelism (replicated and tied parameters are counted
twice or not at all), so its clipping is always off and `clip_and_step` does the work instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.owned import is_owned, sum_owned
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.training.engine_gradients import Gradients

# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ and Megatron do.
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Update:
    """What happened at the end of a step.

    Attributes:
        norm: global L2 norm of the gradient before clipping, 0-dim fp32 on the device.
        skipped: the gradient was not finite and the weights were left alone.
        votes: what any rank voted for.
    """

    norm: Tensor
    skipped: bool
    votes: tuple[bool, ...] = ()


@torch.no_grad()
def global_norm(gradients: Gradients, state: ParallelState, votes: Sequence[bool] = ()) -> tuple[Tensor, Tensor]:
    """L2 norm of the whole model's gradient, every parameter counted once; and on how many of the ranks over which it
    is added up `votes` hold. Returns fp32 tensors: a 0-dim one and one as long as `votes`.

    Replicated parameters are counted on tensor-parallel rank 0, tied copies on the first stage only, experts where they
    are.
    """
    # In fp32 whatever the type of the gradients: the norm of finite fp16 gradients may lie beyond fp16.
    owned = [g for g, p in gradients.pieces() if is_owned(spec_of(p), state)]
    if owned:
        squares = torch.stack(torch._foreach_norm(owned, 2, dtype=torch.float32)).square().sum().to(state.device)
    else:
        squares = torch.zeros((), device=state.device)
    sums = torch.cat([squares.view(1), torch.zeros(len(votes), device=state.device)])
    for index in (index for index, vote in enumerate(votes, start=1) if vote):
        sums[index].fill_(1.0)  # unlike a copy from the host, this does not wait for the device
    sum_owned(sums, state)
    if gradients.partitioned and (group := state.group("data")) is not None:
        torch.distributed.all_reduce(sums, group=group)
    return sums[0].sqrt(), sums[1:]


@torch.no_grad()
def clip_and_step(
    gradients: Gradients,
    state: ParallelState,
    *,
    max_norm: float,
    loss_scale: float = 1.0,
    optimizer_skips: bool = False,
    before_update: Callable[[], None] | None = None,
    votes: Sequence[bool] = (),
) -> Update:
    """Clip to `max_norm` (0 = off) and step, or skip the step when the norm is not finite.

    Args:
        loss_scale: what the gradients are multiplied by at this moment (fp16).
        optimizer_skips: the optimizer must see the overflow itself, because it also owns the loss scale (fp16).
        before_update: called with the gradients complete and not yet clipped.
        votes: what the ranks of this rank's data-parallel group vote for.
    """
    if before_update is not None:
        before_update()
    norm, counts = global_norm(gradients, state, votes)
    norm = norm / loss_scale
    finite, *agreed = torch.cat([torch.isfinite(norm).view(1), counts > 0]).tolist()  # the only time the host waits
    skip = not finite
    if not skip and max_norm > 0:
        coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        scale_by(gradients.pieces(), coefficient)
    gradients.step(skip and not optimizer_skips)
    return Update(norm, skip, tuple(agreed))


def scale_by(pieces: Iterable[tuple[Tensor, Parameter]], coefficient: Tensor) -> None:
    """Multiply every gradient piece by a 0-dim tensor, in place, without reading it on the host."""
    tensors = [g for g, _ in pieces]
    if tensors:
        torch._foreach_mul_(tensors, coefficient.to(tensors[0].device))  # offloaded ones are in the host's memory
