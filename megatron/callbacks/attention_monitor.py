"""Attention in the log: how large its logits are, and how much it spreads.

| metric                  | what it is                                                                    |
|-------------------------|-------------------------------------------------------------------------------|
| `attention/logit_max`   | largest logit q · k · scale, behind the soft cap, of any block                |
| `attention/entropy`     | entropy of the attention weights in nats, mean over queries, heads and blocks |
| `attention/layer_I/...` | the same two of block I alone                                                 |

Of the first row of the step's global batch, up to its last trained token, with the weights behind the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.callbacks import CALLBACKS
from megatron.callbacks.context import RunContext
from megatron.data.batch import StepBatch
from megatron.inference.live import live_stage
from megatron.layers.attention import SelfAttention
from megatron.layers.attention_contract import Call
from megatron.layers.attention_statistics import attention_layers, attention_statistics, watched_attention
from megatron.layers.parts import MIXERS
from megatron.neox_arguments import NeoXArgs
from megatron.training.callback import Callback, due

if TYPE_CHECKING:
    from megatron.training.engine import StepOut
    from megatron.training.trainer import Trainer


@CALLBACKS.register("attention_monitor", phase="measure", idle={"monitor_attention": False}, keys=("monitor_interval",))
class AttentionMonitor(Callback):
    """Every `monitor_interval` steps adds `attention/...` to the next log: the largest attention logit and the mean
    entropy of each block, by a forward pass of one row.

    The same at every layout: all data-parallel ranks take the row that the first one has.
    """

    def __init__(self, args: NeoXArgs, blocks: Sequence[int]) -> None:
        self.args = args
        self.interval = args.logging.monitor_interval
        self.blocks = blocks
        self._row = torch.empty(0)

    @classmethod
    def build(cls, context: RunContext) -> AttentionMonitor | None:
        kinds = enumerate(context.args.model.attention_config or ())
        blocks = [block for block, kind in kinds if kind in MIXERS and issubclass(MIXERS[kind], SelfAttention)]
        return cls(context.args, blocks) if blocks else None

    def start(self, trainer: Trainer) -> None:
        self.layers = attention_layers(trainer.engine.module)
        trainer.batches = self._watched(trainer.batches)

    def _watched(self, batches: Callable[..., Iterator[StepBatch]]) -> Callable[..., Iterator[StepBatch]]:
        def steps(*place: int) -> Iterator[StepBatch]:
            for batch in batches(*place):
                if due(batch.step + 1, self.interval):
                    self._row = first_row(batch)
                yield batch

        return steps

    def after_step(self, trainer: Trainer, out: StepOut) -> None:
        if not due(trainer.step, self.interval):
            return
        trainer.settle()
        with trainer.engine.evaluating(), trainer.progress.during("evaluation"):
            trainer.metrics.update(self._metrics(trainer))

    def _metrics(self, trainer: Trainer) -> dict[str, Tensor]:
        """Collective over all ranks; the same on all."""
        state = trainer.state
        row = self._row.to(state.device)
        if (data := state.group("data")) is not None:
            dist.broadcast(row, group=data, group_src=0)
        tokens, positions, mask, *ids = row.unsqueeze(1)
        counted = _to_last_trained(mask)
        # [largest logit, entropy] of every block of the model
        found = torch.full((2, len(self.blocks)), -math.inf, dtype=torch.float64, device=state.device)
        found[1] = 0.0

        def see(block: int, q: Tensor, k: Tensor, call: Call) -> None:
            found[:, self.blocks.index(block)] = attention_statistics(q, k, call, counted)

        with watched_attention(self.layers, see):
            live_stage(trainer.engine, self.args).run(tokens, positions, doc_ids=ids[0] if ids else None, then=_nothing)
        if (group := state.group("model_pipe")) is not None:
            dist.all_reduce(found[0], op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(found[1], group=group)
        found[1] /= state.tp_size
        metrics = {"attention/logit_max": found[0].max(), "attention/entropy": found[1].mean()}
        for block, (largest, entropy) in zip(self.blocks, found.T, strict=True):
            metrics |= {f"attention/layer_{block}/logit_max": largest, f"attention/layer_{block}/entropy": entropy}
        return metrics


def first_row(batch: StepBatch) -> Tensor:
    """int64 [3 or 4, s] of the first row: tokens, positions, which targets are trained, and document numbers if any."""
    parts = [batch.tokens, batch.positions, batch.mask.long(), batch.doc_ids]
    return torch.stack([part[0, 0] for part in parts if part is not None])


def _to_last_trained(mask: Tensor) -> Tensor:
    """mask [1, s] -> bool [1, s]: up to the last trained token, behind which is padding or what no loss depends on; all
    of a row without any."""
    counted = mask.flip(-1).cummax(-1).values.flip(-1) > 0
    return counted | ~counted.any()


def _nothing(out: object) -> None:
    """What is made of the network's output."""
