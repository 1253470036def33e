"""Mixtures of experts: their load in the log, and biases that balance it.

Legend: M mixture-of-experts layers, E experts.

| metric                  | what it is                                                                                |
|-------------------------|-------------------------------------------------------------------------------------------|
| `moe/load_max`, `_min`  | largest and smallest load of an expert of any layer: its share of the assignments times E |
| `moe/load_entropy`      | entropy of the shares over ln E, mean over layers: 1 = all alike, 0 = one takes all       |
| `moe/dropped_share`     | share of the assignments that found no room (moe_capacity_factor)                         |
| `moe/balance_loss`      | balance loss, mean over layers, without its coefficient: moe_top_k when balanced          |
| `moe/z_loss`            | z-loss, mean over layers, without its coefficient                                         |
| `moe/layer_I/load_...`  | the loads and the entropy of block I                                                      |

All over the global batches since the last log; `moe/...` losses only with their coefficients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.layers.moe.balancing import moe_layers, move_biases
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer

_DROPPED, _BALANCE, _Z, _MICRO_BATCHES = -4, -3, -2, -1


@CALLBACKS.register(
    "experts",
    phase="measure",
    idle={"moe_num_experts": 1},
    keys=("moe_bias_balancing_rate",),
    required_by=("moe_bias_balancing_rate",),
    loses="the load of experts is neither logged nor balanced by biases",
)
class ExpertLoad(Callback):
    """Logs the load of experts, and moves the biases that balance it.

    Communication: with moe_bias_balancing_rate one sum over the data-parallel ranks per step; else only at each log.
    Nothing waits for the device but the log itself.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.blocks = [block for block, mlp in enumerate(model.layer_mlps or ()) if mlp == "moe"]

    @classmethod
    def build(cls, context: RunContext) -> ExpertLoad | None:
        model = context.args.model
        return cls(model) if "moe" in model.layer_mlps else None

    def loaded(self, trainer: Trainer) -> None:
        self.layers = moe_layers(trainer.engine.module)
        self._sums = self._take_load(trainer).zero_()
        self._found = self._sums.clone()

    def before_update(self, trainer: Trainer) -> None:
        self._found = self._take_load(trainer)
        if self.model.moe_bias_balancing_rate > 0:  # behind the update it would wait for the weights on their way
            self._whole(self._found, trainer, "data")

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        found = self._found.masked_fill(out.skipped, 0.0)  # equal loads move no bias
        self._found.zero_()
        if self.model.moe_bias_balancing_rate > 0:
            move_biases(list(self.layers.values()), found[:, :_DROPPED], self.model.moe_bias_balancing_rate)
        self._sums += found
        if due(trainer.step, trainer.args.logging.log_interval):
            trainer.metrics.update(self._metrics(trainer))
            self._sums.zero_()

    def _take_load(self, trainer: Trainer) -> Tensor:
        """[layers of this stage, E + 4], see `Load`."""
        rows = [layer.load.take() for layer in self.layers.values()]
        empty = torch.zeros(0, self.model.moe_num_experts + 4, dtype=torch.float64, device=trainer.state.device)
        return torch.stack(rows) if rows else empty

    def _whole(self, sums: Tensor, trainer: Trainer, group: str) -> Tensor:
        ranks = trainer.state.group(group)
        if ranks is not None and len(sums):
            dist.all_reduce(sums, group=ranks)
        return sums

    def _metrics(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """Collective over the ranks of every stage; the same on all."""
        mine = self._sums
        if self.model.moe_bias_balancing_rate == 0:
            mine = self._whole(mine.clone(), trainer, "data")
        sums = torch.zeros(len(self.blocks), mine.shape[1], dtype=mine.dtype, device=mine.device)
        for row, block in zip(mine, self.layers, strict=True):
            sums[self.blocks.index(block)] = row
        return load_metrics(self._whole(sums, trainer, "pipe"), self.blocks, self.model)


def load_metrics(sums: Tensor, blocks: list[int], model: ModelConfig) -> dict[str, float | Tensor]:
    """`sums` [M, E + 4] of the whole model (`Load`) -> the metrics, see the module's text.

    `blocks`: the number of each layer's block. All NaN when nothing was counted.
    """
    chosen, experts = sums[:, :_DROPPED], sums.shape[1] - 4
    share = chosen / chosen.sum(1, keepdim=True)
    load = share * experts
    entropy = -torch.special.xlogy(share, share).sum(1) / math.log(experts)
    metrics: dict[str, float | Tensor] = {
        "moe/load_max": load.max(),
        "moe/load_min": load.min(),
        "moe/load_entropy": entropy.mean(),
    }
    if model.moe_capacity_factor is not None:
        metrics["moe/dropped_share"] = sums[:, _DROPPED].sum() / chosen.sum()
    wanted = (("balance", _BALANCE, model.moe_aux_loss_coeff), ("z", _Z, model.moe_z_loss_coeff))
    for name, column, coefficient in wanted:
        if coefficient:
            metrics[f"moe/{name}_loss"] = sums[:, column].sum() / sums[:, _MICRO_BATCHES].sum()
    for block, row, evenness in zip(blocks, load, entropy, strict=True):
        metrics |= {
            f"moe/layer_{block}/load_max": row.max(),
            f"moe/layer_{block}/load_min": row.min(),
            f"moe/layer_{block}/load_entropy": evenness,
        }
    return metrics
