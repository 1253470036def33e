"""The teacher of `train_impl: distill`: a second model beside the one that is trained, run forward alone.

It is cut like the model that is trained, whatever layout wrote its checkpoint, and works on the same micro-batches, so
that each rank has what it needs of its own. Shapes: g micro-batches, b, s, v, k as in objectives/distill.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron.callbacks.context import Batches
from megatron.checkpoint.find import Checkpoint
from megatron.data.batch import StepBatch
from megatron.errors import UserError
from megatron.inference.build import build_stage, experts_over_ranks
from megatron.log import get_logger
from megatron.model.head import LMOutput
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.objectives.distill import IDS, LOGPROBS
from megatron.training.setup import Process

logger = get_logger(__name__)

# How the ranks of this run divide a model, and what they compute in.
_OF_THE_RUN = ("model_parallel_size", "pipe_parallel_size", "precision", "attention_backend")


class Teacher:
    """Raises `UserError` when its checkpoint has another vocabulary, or cannot take such long sequences."""

    def __init__(self, process: Process, checkpoint: Checkpoint) -> None:
        args, options = process.args, process.args.post
        if checkpoint.by_neox:
            raise UserError(
                f"distill_teacher: {checkpoint.path} was written by GPT-NeoX; convert it to Hugging Face and back"
            )
        config = checkpoint.manifest.config
        kept = {name: args.get(name) for name in _OF_THE_RUN} | experts_over_ranks(config, args)
        saved = for_inference(NeoXArgs.from_saved({**config, **kept}, source=str(checkpoint.path)))
        own = derive(saved, Facts(process.tokenizer.vocab_size, process.state.topology.world_size))
        self.stage = build_stage(own, process.state, process.tokenizer, checkpoint)
        if self.stage.max_positions < args.model.seq_length:
            raise UserError(
                f"distill_teacher: {checkpoint.path} takes {self.stage.max_positions} tokens, seq_length is "
                f"{args.model.seq_length}"
            )
        self.top_k, self.temperature = options.distill_top_k, options.distill_temperature
        self.chunk = args.model.loss_chunk_size or 512
        logger.info(f"teacher: {checkpoint.path}")

    def beside(self, batches: Batches) -> Batches:
        """The same batches with what the teacher says of them."""

        def steps(consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
            for batch in batches(consumed, step):
                yield self.told(batch)

        return steps

    def told(self, batch: StepBatch) -> StepBatch:
        """The batch with log-probabilities [g, b, s, k] and ids [g, b, s, k] of the teacher's likeliest tokens; with
        distill_top_k 0 those of the whole vocabulary, without ids. On stages that have no head, empty ones."""
        device = self.stage.state.device
        found = []
        for i in range(len(batch.tokens)):
            documents = None if batch.doc_ids is None else batch.doc_ids[i].to(device)
            place = (batch.tokens[i].to(device), batch.positions[i].to(device))
            said = self.stage.run(*place, then=self._likeliest, doc_ids=documents)
            rows, empty = place[0].shape, torch.zeros(*place[0].shape, 0, device=device)
            pair = (empty, empty) if said is None else said
            found.append([part[: rows.numel()].view(*rows, -1) if part.ndim == 2 else part for part in pair])
        ids, logprobs = (torch.stack(parts) for parts in zip(*found, strict=True))
        return replace(batch, extras={**batch.extras, IDS: ids, LOGPROBS: logprobs})

    def _likeliest(self, out: LMOutput) -> tuple[Tensor, Tensor]:
        """(ids [t, k], log-probabilities [t, k])"""
        count = out.shape[0] * out.shape[1]
        ids, logprobs = [], []
        for logits in out.logits_at(torch.arange(count, device=out.hidden.device), self.chunk):
            values = torch.log_softmax(logits / self.temperature, -1)
            if self.top_k:
                values, where = values.topk(min(self.top_k, values.shape[-1]))
                ids.append(where.float())  # whole numbers up to 2^24
            else:
                ids.append(values.new_zeros(len(values), 0))
            logprobs.append(values)
        return torch.cat(ids), torch.cat(logprobs)
