"""Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.mpu.sharding import spec_of
from megatron.optim.matrices import Cut, Held, WholeMatrices, gather_to_owners, held_in, return_from_owners
from megatron.optim.optimizers import OPTIMIZERS, Groups

# Of the quintic iteration (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonalise(x: Tensor, steps: int) -> Tensor:
    """About U V^T for x = U S V^T [..., m, n], whose singular values lie between 0.7 and 1.2 after 5 steps.

    x <- a x + (b A + c A A) x with A = x x^T, from x of Frobenius norm 1; in the type of x.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        products = x @ x.mT
        x = a * x + (b * products + c * (products @ products)) @ x
    return x.mT if tall else x


def rate(shape: torch.Size, adjust: str) -> float:
    """What the learning rate of a matrix [..., m, n] is multiplied by. `match_rms_adamw`: updates as large as AdamW's
    (Liu et al. 2025, arXiv 2502.16982), so that its learning rate serves. `original`: sqrt(max(1, m / n))."""
    m, n = shape[-2:]
    return 0.2 * math.sqrt(max(m, n)) if adjust == "match_rms_adamw" else math.sqrt(max(1.0, m / n))


class Muon(torch.optim.AdamW):
    """B <- momentum B + (1 - momentum) g; w -= lr (rate O + decay w), where O is the orthogonalised B (with nesterov:
    (1 - momentum) g + momentum B), as torch.optim.Muon. Groups without `matrices` are AdamW's.

    Matrices are orthogonalised in the type of the weights. `grad_scale` and `found_inf` are read on the device, as by
    the fused AdamW.
    """

    def __init__(self, groups: Groups, lr: float, params: dict[str, Any]) -> None:
        super().__init__(groups, lr=lr, betas=tuple(params["betas"]), eps=params["eps"], fused=True)
        self.momentum, self.nesterov = params["momentum"], params["nesterov"]
        self.ns_steps, self.adjust, self.qkv = params["ns_steps"], params["adjust_lr_fn"], params["split_qkv"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group.get("matrices")]
        try:
            super().step()
        finally:
            self.param_groups = everything
        cut: Cut = []
        places: dict[int, tuple[Tensor, dict[str, Any]]] = {}  # of what is cut
        for group in everything:
            for tensor in group["params"] if group.get("matrices") else ():
                for held, update in self._accumulate(tensor, group):
                    if len(held.mine) < held.parameter.numel():
                        cut.append((held, update))
                        places[id(held)] = tensor, group
                    else:
                        self._move(tensor, group, held, self._orthogonal(held, update, group))
        whole = [(held, self._orthogonal(held, x, places[id(held)][1])) for held, x in gather_to_owners(cut)]
        for held, made in return_from_owners(cut, whole):
            self._move(*places[id(held)], held, made)

    def _keep(self) -> Tensor | float:
        """1, or 0 in a step that is none."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        return 1.0 if found_inf is None else 1.0 - found_inf

    def _accumulate(self, tensor: Tensor, group: dict[str, Any]) -> Cut:
        """Momentum and decay of a tensor; what is to be orthogonalised of each parameter in it, flat."""
        if tensor.grad is None:
            return []
        state, keep = self.state[tensor], self._keep()
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            state["momentum_buffer"] = torch.zeros_like(tensor)
        gradient: Tensor = tensor.grad
        if (scale := getattr(self, "grad_scale", None)) is not None:
            gradient = gradient / scale
        if isinstance(keep, Tensor):
            gradient = torch.where(keep > 0, gradient, 0.0)  # not finite x 0 is not 0
        state["step"] += keep
        momentum = state["momentum_buffer"].lerp_(gradient, keep * (1 - self.momentum))
        if group["lr"] == 0:
            return []
        tensor.mul_(1 - group["lr"] * group["weight_decay"] * keep)
        update = (gradient.lerp(momentum, self.momentum) if self.nesterov else momentum).view(-1)
        return [
            (held, update[held.offset : held.offset + len(held.mine)].to(held.parameter.dtype))
            for held in held_in(tensor)
            if held.mine
        ]

    def _orthogonal(self, held: Held, update: Tensor, group: dict[str, Any]) -> Tensor:
        """Of all of a parameter that this rank's tensor-parallel part has."""
        matrices: WholeMatrices = group["matrices"]
        local = update.view(held.parameter.shape)

        def one(x: Tensor) -> Tensor:
            return orthogonalise(x, self.ns_steps) * rate(x.shape, self.adjust)

        return matrices.apply(one, local, spec_of(held.parameter), self.qkv)

    def _move(self, tensor: Tensor, group: dict[str, Any], held: Held, update: Tensor) -> None:
        place = tensor.view(-1)[held.offset : held.offset + len(held.mine)]
        place.add_(update.reshape(-1).to(place.dtype) * (-group["lr"] * self._keep()))


@OPTIMIZERS.register(
    "muon",
    moments=2,
    block_moments=1,
    matrices=True,
    params={
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr_fn": "match_rms_adamw",
        "split_qkv": "matrices",
        "betas": (0.9, 0.95),
        "eps": 1e-8,
    },
)
def muon(groups: Groups, lr: float, params: dict[str, Any]) -> torch.optim.Optimizer:
    """Orthogonalised momentum for hidden matrices (q, k, v, up and gate each by itself), AdamW for the rest."""
    return Muon(groups, lr, params)
