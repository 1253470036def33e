"""The teacher of a run that distills: a second model, run forward alone.

It is cut like the model that is trained, whatever layout wrote its checkpoint. Either it is in memory beside that one
and works on the same micro-batches, so that each rank has what it needs of its own; or with distill_precompute it reads
everything before the model is built, and its likeliest tokens are kept. Shapes: g micro-batches, b, s, v, k as in
objectives/distill.py, h its hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from megatron.callbacks.context import Batches
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.start import Start
from megatron.data.batch import StepBatch
from megatron.data.order.data_plan import Datasets
from megatron.data.reference import TEACHER_IDS, TEACHER_LOGPROBS, TeacherStore
from megatron.data.tokens.cache import content_key
from megatron.errors import UserError
from megatron.inference.build import build_stage, experts_over_ranks
from megatron.log import get_logger
from megatron.model.head import LMOutput
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.inference import for_inference
from megatron.objectives.distill import TEACHER_HIDDEN
from megatron.run.data import reference_folder
from megatron.run.other_models import OtherModels
from megatron.run.read_ahead import ReadAhead
from megatron.run.reference import weights_of
from megatron.training.callback import Callback
from megatron.training.progress import Progress
from megatron.training.setup import Process, build_objective

VERSION = 1  # part of every folder's name: raise it when the numbers change
KEY = "distill_teacher"

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
        reads = build_objective(args).reads
        self.inner = options.distill_layers[1] if options.distill_layers and TEACHER_HIDDEN in reads else None
        if TEACHER_HIDDEN in reads and self.inner is None:
            raise UserError("distill_layers: the objective compares hidden states; name the two blocks, as [4, 8]")
        if self.inner is not None and not 0 <= self.inner < own.model.num_layers:
            raise UserError(f"distill_layers: {checkpoint.path} has {own.model.num_layers} blocks, from 0")
        self.stage = build_stage(own, process.state, process.tokenizer, checkpoint, self.inner)
        if self.stage.max_positions < args.model.seq_length:
            raise UserError(
                f"distill_teacher: {checkpoint.path} takes {self.stage.max_positions} tokens, seq_length is "
                f"{args.model.seq_length}"
            )
        self.reads = [name for name in (TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_HIDDEN) if name in reads]
        self.top_k, self.temperature = options.distill_top_k, options.distill_temperature
        self.chunk = args.model.loss_chunk_size or 512
        logger.info(f"teacher: {checkpoint.path}")

    def beside(self, batches: Batches) -> Batches:
        """The same batches with what the teacher says of them."""

        def steps(consumed: int = 0, step: int | None = None) -> Iterator[StepBatch]:
            for batch in batches(consumed, step):
                yield replace(batch, extras={**batch.extras, **self.told(batch)})

        return steps

    def told(self, batch: StepBatch) -> dict[str, Tensor]:
        """Of what the objective reads: log-probabilities [g, b, s, k] and ids [g, b, s, k] of the teacher's likeliest
        tokens, with distill_top_k 0 those of the whole vocabulary without ids; hidden states [g, b, s, h]. On stages
        that have no head, empty ones."""
        device = self.stage.state.device
        found = []
        for i in range(len(batch.tokens)):
            documents = None if batch.doc_ids is None else batch.doc_ids[i].to(device)
            place = (batch.tokens[i].to(device), batch.positions[i].to(device))
            said = self.stage.run(*place, then=self._say, doc_ids=documents)
            rows = place[0].shape
            empty = torch.empty(rows.numel(), 0, device=device)
            parts = [empty] * len(self.reads) if said is None else said
            found.append([part[: rows.numel()].unflatten(0, rows) for part in parts])
        return {name: torch.stack(parts) for name, parts in zip(self.reads, zip(*found, strict=True), strict=True)}

    def _say(self, out: LMOutput) -> list[Tensor]:
        """In the order of `reads`."""
        found = dict(zip((TEACHER_IDS, TEACHER_LOGPROBS), self._likeliest(out), strict=True))
        if self.inner is not None:
            found[TEACHER_HIDDEN] = out.inner_hidden()
        return [found[name] for name in self.reads]

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


class StoredTeacher(Callback):
    """The likeliest tokens of the teacher in a store, for a run that has it in memory only to fill that. Keeps with
    each checkpoint which teacher it is: a run that is resumed needs no more of it than the rows."""

    def __init__(self, process: Process, start: Start, others: OtherModels, datasets: Datasets, begun: int) -> None:
        """Collective, unless the run knows the teacher. `begun`: samples of the training data that it has read."""
        self.process, self.others = process, others
        args = process.args
        own = start.checkpoint.callbacks if start.checkpoint is not None and start.resumes else {}
        self.known: dict[str, Any] = dict(own.get(type(self).__name__) or {})
        self.checkpoint: Checkpoint | None = None
        if self.known.get("named") != args.get(KEY):
            self.checkpoint = others.find(KEY)
            self.known = {"named": args.get(KEY), "model": _identity(self.checkpoint)}
        post = args.post
        top_k = min(post.distill_top_k, process.tokenizer.vocab_size)
        how = [VERSION, top_k, post.distill_temperature, args.optimizer.precision, process.tokenizer.eod]
        how.append(args.model.intra_document_masking)  # the run's: it is told where documents begin, or not
        key = content_key({"model": self.known["model"], "how": how})
        folder = reference_folder(args, datasets.plan) / f"teacher-{key[:16]}"
        self.store = TeacherStore(folder, args.model.seq_length, top_k)
        what = "the likeliest tokens of the teacher"
        self.ahead = ReadAhead(args, process.tokenizer, datasets, datasets.compared(), begun, self.store, what)

    def state_dict(self) -> dict[str, Any]:
        return self.known

    def fill(self, progress: Progress) -> None:
        """What is missing, before the model is built. Collective."""
        state = self.process.state
        missing = self.ahead.missing(state)
        if not missing:
            return
        checkpoint = self.checkpoint or self.others.find(KEY)
        if _identity(checkpoint) != self.known["model"]:
            raise UserError(f"distill_teacher: {checkpoint.path} is not the one that {self.store.folder} is of")
        teacher = Teacher(self.process, checkpoint)

        def says(batch: StepBatch) -> Tensor | None:
            told = teacher.told(batch)
            return torch.cat([told[TEACHER_IDS], told[TEACHER_LOGPROBS]], -1) if state.is_last_stage else None

        self.ahead.fill(missing, state, says, progress.beat, self.known)
        self.ahead.finish(state)


def _identity(checkpoint: Checkpoint) -> str:
    """Hash of what a teacher's numbers depend on: weights, those of a base, configuration."""
    manifest = checkpoint.manifest
    base = None if manifest.base is None else asdict(manifest.base)
    return content_key({"weights": weights_of(checkpoint), "base": base, "config": manifest.config})
