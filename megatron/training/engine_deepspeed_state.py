"""The training state by parameter in an optimizer that DeepSpeed wrapped, whatever ZeRO did to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron.training.engine_state import WEIGHT, OptimizerState, even_cut


class DeepSpeedState(OptimizerState):
    """See `OptimizerState`.

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

    def is_replicated(self, p: Parameter) -> bool:
        """Whether every rank that has the parameter has all of its state: no master, or nothing that is trained (which
        stage 3 divides all the same)."""
        return not (self.partitioned_masters and (p.requires_grad or self.stage == 3))

    def share(self, p: Parameter, rank: int, ranks: int) -> range:
        """Which of the flattened elements this rank answers for; `ranks` that hold the same share replicated ones."""
        if self.is_replicated(p):
            return even_cut(p.numel(), rank, ranks)
        if self.stage == 3:
            size = p.ds_tensor.ds_numel  # type: ignore[attr-defined]
            start = size * self.engine.optimizer._get_param_partition_rank(p)
            whole: int = p.ds_numel  # type: ignore[attr-defined]
            return range(min(start, whole), min(start + size, whole))
        mapping = p._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return range(0)
        address = mapping.lp_fragment_address
        return range(address.start, address.start + address.numel)

    def _pieces(self, p: Parameter, share: range) -> dict[str, Tensor]:
        """Views of the memory that holds this rank's elements of a parameter."""
        if self.is_replicated(p):
            found = {WEIGHT: p.detach().view(-1)[share.start : share.stop]}
            state = self._inner.state.get(p, {})
            for key in self.keys(p):
                if key in state:
                    value = state[key]
                    if value.shape == p.shape:
                        found[key] = value.view(-1)[share.start : share.stop]
                    else:
                        found[key] = value[None] if value.ndim == 1 else value
            return found
        if not p.requires_grad:
            return {WEIGHT: p.ds_tensor.detach()[: len(share)]}  # type: ignore[attr-defined]
        names = [None, *self.keys(p)]
        if self.stage == 3:
            zero = self.engine.optimizer
            # Without padding, which the last parts of a parameter end in.
            return {
                name or WEIGHT: zero._get_fp32_opt_state_partition(p, False, name)[0][: len(share)] for name in names
            }
        mapping = p._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return {name or WEIGHT: torch.empty(0) for name in names}
        self._link(mapping)
        return {name or WEIGHT: mapping.get_hp_fragment(name) for name in names}

    def _link(self, mapping: Any) -> None:
        """Stages 1 and 2: make the moments known to the parameters they belong to.

        DeepSpeed does so once, after the step of the first parameter group, when those of the others do not exist yet.
        """
        if not mapping.optim_fragment and self.keys():
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def publish(self, replicated: Iterable[tuple[Parameter, dist.ProcessGroup]]) -> None:
        """See `OptimizerState`."""
        super().publish(replicated)
        if not self.partitioned_masters:
            return
        zero = self.engine.optimizer
        if self.stage < 3:
            zero.update_lp_params()
            return
        zero.checkpoint_event_prologue()
        for sub_group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(sub_group)
        zero.checkpoint_event_epilogue()  # gathers the small parameters that every rank keeps whole

    def materialize(self) -> None:
        """See `OptimizerState`. Stage 3 gives the inner optimizer one sub-group at a time: here it gets all of them, by
        parameter group."""
        if self.stage == 3:
            zero = self.engine.optimizer
            for group in self._inner.param_groups:
                group["params"] = []
            for sub_group, flat in enumerate(zero.fp32_partitioned_groups_flat):
                self._inner.param_groups[zero.sub_group_to_group_id[sub_group]]["params"].append(flat)
        super().materialize()
        if self.partitioned_masters and self.stage < 3:
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
