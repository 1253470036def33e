"""Log-probabilities of the targets of a batch, by the stages of a model that is being trained.

Shapes: `gas` micro-batches, `b` rows, `s` sequence, `t` = b·s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.inference.stage import Stage
from megatron.model.head import LMOutput


@torch.no_grad()
def log_probabilities(stage: Stage, batch: StepBatch, beat: Callable[[], None] = lambda: None) -> Tensor | None:
    """log p of every target `[gas, b, s]` fp32 (padding and untrained targets too), on ranks of the last stage; None
    elsewhere. The same call on every rank of a copy of the model, inside `Engine.evaluating()`.

    `beat` is called before every micro-batch: a sign of progress.
    """
    batch, found = batch.to(stage.state.device), []
    for micro, targets in enumerate(batch.targets):
        beat()

        def scores(out: LMOutput, targets: Tensor = targets) -> Tensor:
            more = out.shape[0] - len(targets)  # rows that sequence parallelism needs
            padded = torch.cat([targets, targets[-1:].expand(more, -1)]) if more else targets
            return -out.token_loss(padded).view(out.shape)[: len(targets)]

        doc_ids = None if batch.doc_ids is None else batch.doc_ids[micro]
        found.append(stage.run(batch.tokens[micro], batch.positions[micro], then=scores, doc_ids=doc_ids))
    return torch.stack(found) if stage.state.is_last_stage else None
