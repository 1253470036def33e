"""The training state by parameter, whatever ZeRO did to it: which part of each a data-parallel rank has, and that part.

A checkpoint must be readable at any layout, so everything is keyed by the parameter and cut along its flattened
elements; which rank has which of them is the engine's business. Nothing here communicates but `publish`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.sharding import spec_of
from megatron.optim.matrices import is_matrix
from megatron.training.partition_comm import all_gather

WEIGHT = "weight"
FIRST_WEIGHTS = ("x0", "z")  # state that begins with the weights (Madgrad, schedule-free); all else begins with zeros


def even_cut(count: int, rank: int, ranks: int) -> range:
    """Part `rank` of `ranks` of `count` elements: equal parts, of which the last ones may be shorter or empty."""
    size = -(-count // ranks)
    return range(min(rank * size, count), min((rank + 1) * size, count))


def join_cuts(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill a 1-D tensor, of which each rank of the group has set its `even_cut`, with the others. Collective."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = even_cut(flat.numel(), rank, ranks)
    part = flat.new_zeros(len(even_cut(flat.numel(), 0, ranks)))
    part[: len(mine)] = flat[mine.start : mine.stop]
    whole = flat.new_empty(ranks * part.numel())
    all_gather(whole, part, group=group)
    flat.copy_(whole[: flat.numel()])


def _per_element(state: dict[str, Any]) -> list[str]:
    return [k for k, v in state.items() if torch.is_tensor(v) and v.ndim > 0 or k.startswith("exp_")]


class OptimizerState:
    """Reads and writes master weights and optimizer moments, wherever an engine keeps them."""

    @property
    @abstractmethod
    def _inner(self) -> torch.optim.Optimizer:
        """The torch optimizer."""

    @abstractmethod
    def is_replicated(self, p: Parameter) -> bool:
        """Whether every rank that has the parameter has all of its state."""

    @abstractmethod
    def share(self, p: Parameter, rank: int, ranks: int) -> range:
        """Which of the flattened elements this rank answers for; `ranks` that hold the same share replicated ones."""

    @abstractmethod
    def _pieces(self, p: Parameter, share: range) -> dict[str, Tensor]:
        """Views of the memory that holds this rank's elements of a parameter."""

    def master(self, p: Parameter, share: range) -> Tensor:
        """The fp32 weights of the elements in `share`, 1-D: a view of what the optimizer moves."""
        return self._pieces(p, share)[WEIGHT].detach()

    @property
    def averages(self) -> bool:
        """Whether the optimizer's weights in training are not those to be evaluated."""
        return hasattr(self._inner, "average")

    @torch.no_grad()
    def evaluated(self, values: Mapping[str, Tensor]) -> Tensor | None:
        """Of what `read` found, the weights to be evaluated, a new tensor; None where they are those in training."""
        return self._inner.average(values) if self.averages and len(values) > 1 else None  # type: ignore[attr-defined]

    def wants_curvature(self, step: int) -> bool:
        """Whether the optimizer needs an estimate of the curvature before this step."""
        every: int = getattr(self._inner, "curvature_every", 0)
        return every > 0 and (step % every == 0 or not self.moments())

    @property
    def estimates_curvature(self) -> bool:
        return getattr(self._inner, "estimated_tokens", None) is not None

    @contextmanager
    def estimating_curvature(self, tokens: int) -> Iterator[None]:
        """Inside, a step of the optimizer takes gradients of targets that were drawn, and moves no weight."""
        inner: Any = self._inner
        inner.estimated_tokens = tokens
        try:
            yield
        finally:
            inner.estimated_tokens = None

    def set_lr(self, lr: float) -> None:
        """The learning rate of the schedule, which groups scale."""
        for group in self._inner.param_groups:
            group["scheduled_lr"] = lr
            group["lr"] = lr * group.get("lr_mult", 1.0)

    def publish(self, replicated: Iterable[tuple[Parameter, dist.ProcessGroup]]) -> None:
        """Bring every rank up to date with what `write` set on each. Collective.

        `replicated`: the parameters whose state each rank of the group has whole, and of which it has set its share.
        """
        with torch.no_grad():
            for p, group in replicated:
                everything = range(p.numel())
                for piece in (self._pieces(p, everything) | self._kept(p, everything)).values():
                    if piece.ndim == 1:
                        join_cuts(piece, group)

    def keys(self, p: Parameter | None = None) -> list[str]:
        """Names of the optimizer's per-element state (`exp_avg`, ...) of a parameter, or of any; empty before the first
        step."""
        inner = self._inner
        if not any("matrices" in group for group in inner.param_groups):
            return next((_per_element(state) for state in inner.state.values()), [])
        found: dict[str, None] = {}
        for group in inner.param_groups:
            if p is None or bool(group["matrices"]) == is_matrix(spec_of(p)):
                states = (state for tensor in group["params"] if (state := inner.state.get(tensor)))
                found |= dict.fromkeys(next((_per_element(state) for state in states), []))
        return list(found)

    def _kept(self, p: Parameter, share: range) -> dict[str, Tensor]:
        """What the optimizer keeps of a parameter besides: of the elements in `share`, 1-D, and of the whole."""
        kept: dict[str, Tensor] = getattr(self._inner, "kept", {}).get(p, {})
        if not self.is_replicated(p):
            return kept
        return {key: value[share.start : share.stop] if value.ndim == 1 else value for key, value in kept.items()}

    def moments(self) -> set[str]:
        """Names of all that the optimizer keeps; empty before the first step."""
        kept: dict[Parameter, dict[str, Tensor]] = getattr(self._inner, "kept", {})
        return {*self.keys(), *(key for values in kept.values() for key in values)}

    def read(self, p: Parameter, share: range) -> dict[str, Tensor]:
        """fp32 master weight and moments of the elements in `share`, 1-D. State that is not per element comes whole,
        with another number of dimensions."""
        found = self._pieces(p, share) | self._kept(p, share)
        return {key: value.detach().float() for key, value in found.items()}

    def write(self, p: Parameter, share: range, values: dict[str, Tensor]) -> None:
        """The inverse of `read`; call `publish` once after the last parameter. Moments that are not in `values` are as
        before the first step."""
        with torch.no_grad():
            for key, piece in (self._pieces(p, share) | self._kept(p, share)).items():
                value = values.get(key, values.get(WEIGHT) if key in FIRST_WEIGHTS else None)
                if value is not None:
                    piece.copy_(value.reshape(piece.shape))
                elif key != WEIGHT:
                    piece.zero_()

    def materialize(self) -> None:
        """Create the moments of an optimizer that has not stepped yet, so that `write` has something to fill.

        One step with zero gradients and a zero learning rate makes them, whatever the optimizer. What it does to the
        weights (Madgrad moves them a little: its rate is lr + eps) and moments is written over by `write` of every
        parameter, and the step counts by `load_scalars`.
        """
        inner = self._inner
        saved = [(group["lr"], group.get("weight_decay", 0.0)) for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        # Offloaded masters keep the buffers of their gradients.
        gradients = [[p.grad for p in group["params"]] for group in inner.param_groups]
        with torch.no_grad():
            for group in inner.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            inner.step()
            for group, kept in zip(inner.param_groups, gradients, strict=True):
                for p, gradient in zip(group["params"], kept, strict=True):
                    p.grad = gradient
        for group, (lr, decay) in zip(inner.param_groups, saved, strict=True):
            group["lr"], group["weight_decay"] = lr, decay

    def steps(self) -> float:
        """Updates applied so far, as the optimizer counts them (Adam's bias correction)."""
        for state in self._inner.state.values():
            if "step" in state:
                return float(state["step"])
        return 0.0

    def set_steps(self, steps: float) -> None:
        self._set("step", steps)

    def counters(self) -> dict[str, float]:
        """What else the optimizer counts: numbers, the same for all parameters."""
        for state in self._inner.state.values():
            return {key: value for key, value in state.items() if key != "step" and isinstance(value, float)}
        return {}

    def set_counters(self, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._set(key, value)

    def _set(self, key: str, value: float) -> None:
        for state in self._inner.state.values():
            if torch.is_tensor(state.get(key)):
                state[key].fill_(value)
            elif key in state:
                state[key] = value
