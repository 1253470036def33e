"""What data-parallel ranks exchange in buckets, of each of which every rank owns a part: the sums of gradients behind
the backward pass that completes them, the weights in front of the layer that needs them.

Legend: n elements of a bucket, of which each of r ranks owns n / r, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.mpu.product_sums import offer_sum, sums_products
from megatron.mpu.sharding import spec_of

ELEMENTS = 2**25  # of a bucket, or
ELEMENTS_PER_RANK = 2**20  # times the ranks that share it: what each sends at once stays worth a message

# torch 2.13 renamed both, and warns at each call under the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def most_elements(ranks: int, asked: int | None = None) -> int:
    """Of a bucket that so many ranks share, or `asked` if that is less: with the 5e8 of many configs for DeepSpeed, one
    bucket would hold a whole model, and nothing would overlap. A larger parameter has a bucket of its own."""
    most = max(ELEMENTS, ELEMENTS_PER_RANK * ranks)
    return most if asked is None else min(asked, most)


def own_part(flat: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of `flat` [n], a view [n / r]; all of it without a group."""
    if group is None:
        return flat
    return flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]


def start_reduce_scatter(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to add up `flat` [n] over the group; after `wait` this rank's part holds the sums, and the rest nothing of
    use."""
    return _reduce_scatter(own_part(flat, group), flat, group=group, async_op=True)


def start_all_gather(flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill `flat` [n], of which this rank has set its part, with the parts of others; done after `wait`."""
    return all_gather(flat, own_part(flat, group), group=group, async_op=True)


class Bucket(Protocol):
    """Parameters whose sums and weights travel together."""

    @property
    def totals(self) -> Sequence[tuple[Parameter, Tensor]]:
        """Each parameter with the sum of its gradients, fp32, of any shape."""
        ...

    def start_reduction(self) -> None:
        """Begin to add the sums up into their owners' parts."""
        ...

    def wait(self) -> None:
        """Until what was started is done. On an accelerator the device's stream waits, not the host."""
        ...


def accumulate(total: Tensor, gradient: Tensor, first: bool) -> None:
    """Add a gradient to its sum; the first of a step is written, which saves a pass over zeros."""
    gradient = gradient.reshape(total.shape)
    if first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def _adds_in_product(p: Parameter, total: Tensor) -> bool:
    """Whether the products that make this weight's gradients add them up: not where a gradient comes another way too,
    as that of a matrix that is the table of the embedding."""
    half = p.dtype in (torch.bfloat16, torch.float16) and total.dtype == torch.float32
    return half and p.dim() == 2 and spec_of(p).kind == "matrix" and sums_products(total.device)


class GradientSums:
    """Gradients of a step: each is added to its sum as a backward pass produces it, and let go; those of matrices on a
    GPU by the product that makes them (`product_sums`). In the last pass a bucket's reduction begins when its last
    gradient has come.

    Per step: `end_pass` after each backward pass, and `clear`.

    Args:
        buckets: in the order in which backward passes complete them.
        passes: of a step, until `set_passes`.
        add: as `accumulate`.
    """

    def __init__(
        self, buckets: Sequence[Bucket], passes: int, add: Callable[[Tensor, Tensor, bool], None] | None = None
    ) -> None:
        self.buckets = buckets
        self.passes = passes
        self._add_up = add
        # By bucket: each sum, and whether it holds a gradient of this step: a bool in the memory of a tensor on the
        # host, where products find it as well.
        self._sums: list[list[tuple[Tensor, Any]]] = []
        for index, bucket in enumerate(buckets):
            self._sums.append([])
            for p, total in bucket.totals:
                begun = torch.zeros((), dtype=torch.bool)
                self._sums[-1].append((total, begun.numpy()))
                p.register_post_accumulate_grad_hook(partial(self._add, index, *self._sums[-1][-1]))
                if _adds_in_product(p, total):
                    arrival = offer_sum(p, total, begun)
                    arrival.register_post_accumulate_grad_hook(partial(self._added, index, p))
        self.clear()

    def set_passes(self, passes: int) -> None:
        """Between two steps: those to come have so many."""
        self.passes = passes
        self.clear()

    def clear(self) -> None:
        """Before the first pass of a step."""
        self._left = self.passes
        for _, begun in (row for rows in self._sums for row in rows):
            begun[()] = False
        self._missing = [len(bucket.totals) for bucket in self.buckets]  # without a gradient yet in the last pass
        self._reduced = 0  # buckets whose reduction has begun

    @torch.no_grad()
    def _add(self, index: int, total: Tensor, begun: Any, p: Parameter) -> None:
        """The hook behind each gradient."""
        gradient, p.grad = p.grad, None
        if gradient is None:  # torch 2.13 calls it as well where all products have added theirs
            return
        self._count(index, p)
        (self._add_up or accumulate)(total, gradient, not begun)
        begun[()] = True
        self._reduce_complete()

    @torch.no_grad()
    def _added(self, index: int, p: Parameter, arrival: Tensor) -> None:
        """The hook behind gradients that the products of a pass have added themselves."""
        arrival.grad = None
        self._count(index, p)
        self._reduce_complete()

    def _count(self, index: int, p: Parameter) -> None:
        if index < self._reduced:
            raise RuntimeError(f"{p.spec.key} got a gradient while the sum of all was on its way")  # type: ignore[attr-defined]
        if self._left == 1:
            self._missing[index] -= 1

    def _reduce_complete(self) -> None:
        """Begin with the buckets that are complete, in their order: it must be the same on every rank, whichever
        parameters got no gradient there."""
        while self._reduced < len(self.buckets) and self._missing[self._reduced] <= 0:
            self.buckets[self._reduced].start_reduction()
            self._reduced += 1

    @torch.no_grad()
    def end_pass(self) -> None:
        """After each backward pass. After the last one, parameters without any gradient have a gradient of zeros, and
        all reductions have begun."""
        self._left -= 1
        if self._left < 0:
            raise RuntimeError(f"more than {self.passes} backward passes in a step")
        if self._left:
            return
        for total, begun in (row for rows in self._sums[self._reduced :] for row in rows):
            if not begun:
                total.zero_()
        self._missing = [0] * len(self.buckets)
        self._reduce_complete()


class Arrivals:
    """Which buckets of weights a layer needs: while they travel, those before it compute.

    Args:
        layers: of this rank, as they are called.
        buckets: whose weights travel.
    """

    def __init__(self, layers: Iterable[nn.Module], buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        of_parameter = {id(p): bucket for bucket in buckets for p, _ in bucket.totals}
        self._needed = {
            layer: list({id(b): b for p in layer.parameters() if (b := of_parameter.get(id(p)))}.values())
            for layer in layers
        }

    def wait_before(self, layer: nn.Module) -> None:
        """Until a layer's weights have arrived."""
        for bucket in self._needed[layer]:
            bucket.wait()

    def wait_for_all(self) -> None:
        """Until all weights have."""
        for bucket in self.buckets:
            bucket.wait()
