"""Mistakes between pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from torch import Tensor

from megatron.data.batch import StepBatch
from megatron.layers.documents import Documents
from megatron.layers.parts import BlockSpec
from megatron.model import gpt
from megatron.model.pipe import LayerPipe
from megatron.mpu import initial_weights
from megatron.mpu.state import ParallelState
from megatron.training.engine_step import StepEngine
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

PP = Layout(pp=2)
# Micro-batches that differ in everything, and several of them under way.
ONE_ROW = Layout(pp=2, micro=1)


@mutant("neox-tied", PP, "gradient of 0.word_embeddings.weight", engines="deepspeed")
def drop_tied_reduction() -> Any:
    """The two copies of a tied weight keep gradients of their own."""
    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ReduceTiedGrads: lambda self: None})


@mutant("neox-tied", PP, "gradient of 0.word_embeddings.weight", engines="deepspeed")
def reduce_tied_twice() -> Any:
    """The gradients of the copies are added up, and once more with everything that is replicated."""
    original = PipelineEngine._INSTRUCTION_MAP[ReduceTiedGrads]

    def twice(self: PipelineEngine) -> None:
        original(self)
        original(self)

    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, {ReduceTiedGrads: twice})


@mutant("neox-tied", PP, "gradient norm")
def tied_counted_on_both_stages() -> Any:
    """Both copies of a tied weight enter the norm: √2 of its part."""
    return mock.patch("megatron.training.engine_update.is_owned", lambda spec, *place: True)


@mutant("neox-tied", PP, "weight of 0.word_embeddings.weight")
def scale_the_tied_copy() -> Any:
    """The head's copy of a tied weight starts with another scale than the embedding's."""
    original = initial_weights._initial_shard

    def scaled(spec: Any, key: str, seed: int, state: ParallelState) -> Tensor:
        copy = spec.tied is not None and state.is_last_stage
        return original(spec, key, seed, state) * (2**0.5 if copy else 1.0)

    # The stages would be made equal again when the engine starts.
    synchronised = mock.patch.object(LayerPipe, "_synchronize_tied_weights", lambda self: None)
    return _both(mock.patch.object(initial_weights, "_initial_shard", scaled), synchronised)


class _both:
    """Two patches as one."""

    def __init__(self, *patches: Any) -> None:
        self.patches = patches

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()

    def __exit__(self, *error: object) -> None:
        for patch in self.patches:
            patch.stop()


@mutant("neox", PP, "gradient norm")
def norm_of_own_stage() -> Any:
    """Each stage clips by the norm of its own layers."""

    def own(x: Tensor, state: ParallelState, *partitioned: bool) -> Tensor:
        if (group := state.group("model")) is not None:
            dist.all_reduce(x, group=group)
        return x

    return mock.patch("megatron.training.engine_update.sum_owned", own)


@mutant("neox", PP, "weight of 3.attention.query_key_value.weight")
def layers_numbered_per_stage() -> Any:
    """Every stage draws its first layer as the first of all (Megatron-FSDP: names of layers are local)."""
    original = initial_weights._initial_shard

    def drawn(spec: Any, key: str, seed: int, state: ParallelState) -> Tensor:
        layer, _, rest = key.partition(".")
        local = 2 if state.pp_rank and layer == "3" else int(layer)
        return original(spec, f"{local}.{rest}", seed, state)

    return mock.patch.object(initial_weights, "_initial_shard", drawn)


@mutant("gemma3", PP, "loss")
def windows_numbered_per_stage() -> Any:
    """The pattern of windows starts again with every stage."""
    original = gpt._build_block

    def built(model: Any, state: ParallelState, rotary: Any, spec: BlockSpec) -> Any:
        local = spec.layer - state.pp_rank * model.num_layers // state.pp_size
        return original(model, state, rotary, replace(spec, window=model.layer_windows[local]))

    return mock.patch.object(gpt, "_build_block", built)


def _behind(pipe: LayerPipe) -> bool:
    return pipe.forward_funcs is not None and not hasattr(pipe.forward_funcs[0], "word_embeddings")


def _received(change: Any) -> Any:
    """Change what a later stage gets from the one before: `change(pipe, fields)`, fields by name."""
    original = LayerPipe.forward

    def forward(self: LayerPipe, tensors: Any) -> Any:
        if _behind(self):
            names = [name for name in self.carried if name not in ("positions", "documents", "tokens")]
            fields = dict(zip(names, tensors, strict=True))
            tensors = tuple(change(self, fields).values())
        return original(self, tensors)

    return mock.patch.object(LayerPipe, "forward", forward)


def _known(name: str, change: Any) -> Any:
    """Change what a later stage has of a micro-batch by itself: `change(pipe, value)`, `name` as in a carry."""
    original = LayerPipe.forward

    def forward(self: LayerPipe, tensors: Any) -> Any:
        if _behind(self):
            known = next(self.micro_batches)
            known[name] = change(self, known[name])
            self.micro_batches = chain([known], self.micro_batches)
        return original(self, tensors)

    return mock.patch.object(LayerPipe, "forward", forward)


@mutant("documents", ONE_ROW, "loss")
def documents_of_the_micro_batch_before() -> Any:
    """A later stage masks with the documents of the micro-batch before."""
    return _known("documents", _late())


@mutant("rpe", ONE_ROW, "loss")
def tokens_of_the_micro_batch_before() -> Any:
    """A later stage has the value embeddings of the micro-batch before."""
    return _known("tokens", _late())


def _late() -> Any:
    """What there was in the micro-batch before."""
    kept: dict[int, Any] = {}

    def late(pipe: LayerPipe, value: Any) -> Any:
        before, kept[id(pipe)] = kept.get(id(pipe), value), value
        return before

    return late


@mutant("documents", PP, "loss")
def documents_of_the_first_stage_alone() -> Any:
    """Attention of a later stage crosses the borders of documents."""
    return _known("documents", lambda pipe, documents: Documents(torch.zeros_like(documents.ids)))


@mutant("moe-all", PP, "gradient of 2.mlp.router.weight")
def balance_lost_between_stages() -> Any:
    """What the experts of earlier stages add to the loss is lost on the way."""

    def lost(pipe: LayerPipe, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**fields, "balance": fields["balance"] * 0.0}

    return _received(lost)


@mutant("moe-all", PP, "gradient of 2.mlp.router.weight")
def balance_counted_per_stage() -> Any:
    """What the experts of a stage add to the loss is added once more by every later stage."""

    def again(pipe: LayerPipe, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**fields, "balance": fields["balance"] * 2.0}

    return _received(again)


@mutant("rpe", PP, "gradient of 0.shared_positions.weight")
def shared_gradient_of_the_first_stage() -> Any:
    """What all layers share gets the gradient of the first stage's layers only."""

    def cut(pipe: LayerPipe, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        if fields["shared"].requires_grad:
            fields["shared"].register_hook(torch.zeros_like)
        return fields

    return _received(cut)


@mutant("neox", ONE_ROW, "loss")
def labels_of_the_next_micro_batch() -> Any:
    """The last stage reads its labels one micro-batch ahead."""
    original = StepEngine._micro_batches

    def ahead(self: StepEngine, batch: StepBatch, weights: Sequence[float]) -> Iterator[Any]:
        found = list(original(self, batch, weights))
        labels = [labels for _, labels in found]
        for (inputs, _), later in zip(found, [*labels[1:], labels[0]], strict=True):
            yield inputs, later

    return mock.patch.object(StepEngine, "_micro_batches", ahead)


@mutant("learned", Layout(pp=2, tp=2, micro=1, sequence_parallel=True), "gradient of 5.norm.weight")
def final_norm_of_own_tokens() -> Any:
    """The last stage's norm has no layer around it that sums its gradient over the slices of the sequence."""
    from megatron.model.head import FinalNorm

    original = FinalNorm.__init__

    def init(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.norm._shared = lambda weight: weight

    return mock.patch.object(FinalNorm, "__init__", init)


@mutant("moe-deep", PP, "assignments in block 0 in step 0", engines="deepspeed")
def stage_walked_back_twice() -> Any:
    """A stage is walked back once for each tensor that it sent: what its backward pass counts is counted twice."""
    return mock.patch("megatron.model.pipe._backward_at_once", lambda sent: None)
