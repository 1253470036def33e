"""The training state by canonical parameter name, whatever ZeRO did to it.

A checkpoint must be readable at any layout, so what leaves here is whole over the data-parallel group
and keyed by the parameter's own name; only tensor-parallel sharding remains (checkpoint/ undoes that).
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor
from torch.nn import Parameter

WEIGHT = "weight"


class OptimizerState:
    """Reads and writes master weights and optimizer moments through the wrapped DeepSpeed optimizer.

    Args:
        engine: the DeepSpeed engine.
        stage: the ZeRO stage that runs (0: the optimizer is a bare torch optimizer).
    """

    def __init__(self, engine: Any, stage: int, partitioned_masters: bool) -> None:
        self.engine = engine
        self.stage = stage
        self.partitioned_masters = partitioned_masters

    @property
    def _inner(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer if self.partitioned_masters else self.engine.optimizer

    def keys(self) -> list[str]:
        """Names of the optimizer's per-element state (`exp_avg`, ...); empty before the first step."""
        for state in self._inner.state.values():
            return [k for k, v in state.items() if torch.is_tensor(v) and v.numel() > 1 or k.startswith("exp_")]
        return []

    def read(self, p: Parameter) -> dict[str, Tensor]:
        """fp32 master weight and moments of one parameter, in its local shape. Collective over the data group."""
        if not self._has_master(p):
            out = {WEIGHT: p.detach().float()}
            out.update({k: self._inner.state[p][k].detach().float() for k in self.keys() if p in self._inner.state})
            return out
        self._link(p)
        out = {WEIGHT: safe_get_full_fp32_param(p)}
        out.update({k: safe_get_full_optimizer_state(p, k) for k in self.keys()})
        shape = getattr(p, "ds_shape", p.shape)
        return {k: v.detach().reshape(shape).float() for k, v in out.items()}

    def write(self, p: Parameter, values: dict[str, Tensor]) -> None:
        """The inverse of `read`; call `publish` once after the last parameter."""
        if not self._has_master(p):
            with torch.no_grad():
                p.copy_(values[WEIGHT])
            for key in self.keys():
                if key in values and p in self._inner.state:
                    self._inner.state[p][key].copy_(values[key])
            return
        if self.stage == 3:
            self._write_partition(p, values[WEIGHT])  # `publish` cannot do it: DeepSpeed has no such call for stage 3
        self._write_full(p, values[WEIGHT])
        self._link(p)
        for key in self.keys():
            if key in values:
                self._write_full(p, values[key], key)

    def write_weight(self, p: Parameter, weight: Tensor) -> None:
        """Set only the weight (model dtype and, where there is one, the master)."""
        if self.stage == 3:
            self._write_partition(p, weight)
        else:
            with torch.no_grad():
                p.copy_(weight.to(p.device))
        if self._has_master(p):
            self._write_full(p, weight.float())

    def _has_master(self, p: Parameter) -> bool:
        """Whether the optimizer keeps a copy of its own; of what it does not train it keeps nothing."""
        return self.partitioned_masters and p.requires_grad

    def _write_partition(self, p: Parameter, weight: Tensor) -> None:
        """Stage 3: set the parameter itself, in the model's type. Collective over the data group."""
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            p.copy_(weight.to(p.device))

    def _write_full(self, p: Parameter, value: Tensor, key: str | None = None) -> None:
        """Set this rank's part of the master weight, or of the moment `key`, from the full value."""
        value = value.to(self.engine.device)
        if self.stage == 3:
            # DeepSpeed's own setter fails where the ranks' parts do not divide a parameter evenly.
            zero = self.engine.optimizer
            part, _ = zero._get_fp32_opt_state_partition(p, release_swap_buffers=False, optim_state_key=key)
            mine = value.flatten()[part.numel() * zero._get_param_partition_rank(p) :][: part.numel()]
            with torch.no_grad():
                part[: mine.numel()].copy_(mine)
        elif key is None:
            safe_set_full_fp32_param(p, value)
        else:
            safe_set_full_optimizer_state(p, value, key)

    def _link(self, p: Parameter) -> None:
        """Stages 1 and 2: make the moments known to the parameters they belong to.

        DeepSpeed does so once, after the step of the first parameter group, when those of the others do not exist yet.
        """
        mapping = getattr(p, "_hp_mapping", None)
        if mapping is not None and not mapping.optim_fragment and self.keys():
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def publish(self) -> None:
        """Bring the model's weights up to date with the masters that `write` set."""
        if self.partitioned_masters and self.stage < 3:
            self.engine.optimizer.update_lp_params()

    def materialize(self) -> None:
        """Create the moments of an optimizer that has not stepped yet, so that `write` has something to fill.

        One step with zero gradients and a zero learning rate makes them, whatever the optimizer. What it does to the
        weights (Madgrad moves them a little: its rate is lr + eps) and moments is written over by `write` of every
        parameter, and the step counts by `load_scalars`.
        """
        inner = self._inner
        saved = [(group["lr"], group.get("weight_decay", 0.0)) for group in inner.param_groups]
        flat = self._flat_parameters()
        for group in inner.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        if flat is not None:
            for group, tensors in zip(inner.param_groups, flat, strict=True):
                group["params"] = tensors
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
        if self.partitioned_masters and self.stage < 3:
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _flat_parameters(self) -> list[list[Tensor]] | None:
        """Stage 3 gives the inner optimizer one sub-group at a time; list them all, by parameter group."""
        if self.stage != 3:
            return None
        zero = self.engine.optimizer
        groups: list[list[Tensor]] = [[] for _ in self._inner.param_groups]
        for sub_group, flat in enumerate(zero.fp32_partitioned_groups_flat):
            groups[zero.sub_group_to_group_id[sub_group]].append(flat)
        return groups

    def steps(self) -> float:
        """Updates applied so far, as the optimizer counts them (Adam's bias correction)."""
        for state in self._inner.state.values():
            if "step" in state:
                return float(state["step"])
        return 0.0

    def set_steps(self, steps: float) -> None:
        for state in self._inner.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(steps)
            elif "step" in state:
                state["step"] = steps
