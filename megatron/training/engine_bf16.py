"""The gradients of DeepSpeed's BF16_Optimizer (bf16 weights, fp32 masters, ZeRO-1), reduced here instead of by it.

DeepSpeed reduces everything to every rank behind the last backward pass, and gathers all weights before the next
forward pass. Its optimizer keeps one flat piece of memory for each of its groups of parameters, cut into one part per
data-parallel rank. With groups that are buckets (`cut_groups`) each is reduced into its owners' parts as soon as it is
complete, and its weights are gathered while the next step begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState
from megatron.optim.matrices import Held, hold, shares_of
from megatron.optim.scaled_step import scaled_step
from megatron.training.native.fixed_point import FixedPointSums
from megatron.training.partition_comm import GradientSums, most_elements, start_all_gather, start_reduce_scatter


def cut_groups(
    groups: list[dict[str, Any]],
    params: Iterable[Parameter],
    state: ParallelState,
    tied: Iterable[Parameter],
    most: int | None = None,
) -> list[dict[str, Any]]:
    """Optimizer groups as buckets, in the order in which backward passes complete them: the last layer's first.

    Args:
        groups: each with its parameters in the model's order.
        params: all of the model's, in its order.
        tied: copies of them are on other pipeline stages: each has a bucket of its own, so that all are cut alike.
        most: elements of a bucket (`most_elements`).
    """
    if state.dp_size == 1:
        return groups
    place = {id(p): index for index, p in enumerate(params)}
    alone = {id(p) for p in tied}
    buckets: list[dict[str, Any]] = []
    for group in groups:
        experts = state.ep_size if spec_of(group["params"][0]).experts else 1
        limit = most_elements(state.dp_size // experts, most)
        members: list[Parameter] = []
        for p in reversed(group["params"]):
            if id(p) in alone:
                buckets.append({**group, "params": [p]})
                continue
            if members and sum(member.numel() for member in members) + p.numel() > limit:
                buckets.append({**group, "params": members})
                members = []
            members = [*members, p]
        if members:
            buckets.append({**group, "params": members})
    return sorted(buckets, key=lambda bucket: -min(place[id(p)] for p in bucket["params"]))


class FlatGroup:
    """One of the optimizer's groups: a `partition_comm.Bucket`.

    Args:
        outer: the BF16_Optimizer.
        index: of the group.
        ranks: over whose samples its gradients are a mean; None when DeepSpeed reduces them.
    """

    def __init__(self, outer: Any, index: int, ranks: int | None) -> None:
        group = outer.real_dp_process_group[index]
        self.group: dist.ProcessGroup | None = group if dist.get_world_size(group) > 1 else None
        self.ranks = ranks
        self.weights: Tensor = outer.bf16_groups_flat[index]
        self.own_weights: Tensor = outer.bf16_partitioned_groups[index][dist.get_rank(group)]
        self.master: Tensor = outer.fp32_groups_flat_partition[index]
        self.sums: Tensor = outer.fp32_groups_gradients_flat[index]
        self.own_sums: Tensor = outer.fp32_groups_gradient_flat_partition[index]
        rows = zip(outer.bf16_groups[index], outer.fp32_groups_gradients[index], strict=True)
        self.totals: list[tuple[Parameter, Tensor]] = list(rows)
        self._work: dist.Work | None = None
        self._unscaled = False
        if outer.optimizer.param_groups[index].get("matrices"):
            hold(self.master, list(self._held(dist.get_rank(group), dist.get_world_size(group))))
        for p, total in self.totals:
            # What DeepSpeed adds up over the stages that have a tied weight.
            p._hp_grad = self.own_sums if ranks is not None and len(self.totals) == 1 else total  # type: ignore[attr-defined]

    def _held(self, rank: int, ranks: int) -> Iterator[Held]:
        """What of each parameter lies in `master`, for optimizers of whole matrices."""
        start, part = 0, self.master.numel()
        for p, _ in self.totals:
            shares = shares_of(start, p.numel(), part, ranks)
            yield Held(p, max(start - rank * part, 0), shares, rank, self.group)
            start += p.numel()

    def start_reduction(self) -> None:
        if self.ranks is None:
            return
        self._unscaled = self.ranks > 1
        if self.group is not None:
            self._work = start_reduce_scatter(self.sums, self.group)

    def start_publishing(self) -> None:
        """Begin to bring every rank's weights up to date with the masters."""
        self.wait()
        self.own_weights.copy_(self.master.detach())
        if self.group is not None:
            self._work = start_all_gather(self.weights, self.group)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._unscaled:
            self._unscaled = False
            self.own_sums.mul_(1.0 / self.ranks)  # type: ignore[operator]

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        """This rank's part of the reduced gradients, 1-D, by parameter; all of them when DeepSpeed reduces them."""
        for p, total in self.totals:
            if self.ranks is None:
                yield total, p
            elif (mapping := p._hp_mapping) is not None:  # type: ignore[attr-defined]
                address = mapping.lp_fragment_address
                yield total.narrow(0, address.start, address.numel), p


class Bf16Gradients:
    """An `engine_gradients.Gradients`.

    Args:
        optimizer: DeepSpeed's.
        passes: backward passes of a step.
        ranks: data-parallel ranks, when their gradients are reduced here; None when DeepSpeed does it.
    """

    fixed_point: FixedPointSums | None = None

    def __init__(self, optimizer: Any, passes: int, ranks: int | None) -> None:
        self.optimizer = optimizer
        self.partitioned = ranks is not None
        self.buckets = [FlatGroup(optimizer, index, ranks) for index in range(len(optimizer.bf16_groups))]
        self._sums = GradientSums(self.buckets, passes)
        self.set_passes = self._sums.set_passes
        # Both stand in for DeepSpeed's methods, which add all gradients up after a backward pass (with an fp32 copy of
        # each), and gather all weights at once.
        optimizer.update_hp_grads = lambda clear_lp_grads=False: self._sums.end_pass()
        optimizer.update_lp_params = self.publish

    def wait(self) -> None:
        """Until the reduced gradients, or the weights, have arrived."""
        for bucket in self.buckets:
            bucket.wait()

    def pieces(self) -> Iterator[tuple[Tensor, Parameter]]:
        self.wait()
        for bucket in self.buckets:
            yield from bucket.pieces()

    @torch.no_grad()
    def publish(self) -> None:
        """Begin to bring every rank's weights up to date with the masters: those of the first layers first."""
        for bucket in reversed(self.buckets):
            bucket.start_publishing()

    def step(self, scale: Tensor | None, found_inf: Tensor, overflow: Tensor) -> None:
        outer = self.optimizer
        # BF16_Optimizer.step would first compute a norm of its own (one more pass over all gradients).
        for bucket in self.buckets:
            bucket.master.grad = bucket.own_sums
        scaled_step(outer.optimizer, scale, found_inf)
        if outer.optimizer.state:  # not before the first step that is taken
            outer._lazy_init_hp_params_optimizer_state()
        self.publish()  # from the same masters as before, when none was moved
        self._sums.clear()
