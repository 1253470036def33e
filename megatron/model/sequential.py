"""Running a list of layers, and the whole network as one plain module. No DeepSpeed here.

Legend: b batch, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.layers.attention import SelfAttention
from megatron.layers.documents import Documents
from megatron.layers.kv_cache import KVCache
from megatron.layers.mamba import Mamba
from megatron.layers.mamba2 import Mamba2
from megatron.log import get_logger
from megatron.model.block import Block
from megatron.model.carry import balance_of, documents_of, passed_on
from megatron.model.gpt import Layer, build_layer
from megatron.model.head import LMOutput, Then
from megatron.model.recompute import Recompute, recomputed
from megatron.mpu.state import ParallelState

logger = get_logger(__name__)


def run_layers(layers: Sequence[nn.Module], carry: Any, recompute: Recompute, cache: KVCache | None = None) -> Any:
    """Send the carry through `layers`; the i-th layer with `uses_cache` gets `cache[i]`.

    Blocks recompute themselves one by one; chunks of several (`checkpoint_num_layers` > 1) are recomputed here.
    """
    if cache is not None:
        slots = iter(range(len(cache)))
        for layer in layers:
            carry = layer(carry, cache[next(slots)]) if getattr(layer, "uses_cache", False) else layer(carry)
        return carry
    carry = share_documents(layers, carry)
    for chunk in _chunks(layers, recompute):
        if len(chunk) == 1:
            carry = chunk[0](carry)
        else:
            carry = passed_on(carry, *recomputed(_through(chunk), recompute.policy, *carry))
    return numbers_only(carry)


def share_documents(layers: Sequence[nn.Module], carry: Any) -> Any:
    """(hidden or tokens, positions, document numbers, ...) -> the same with the numbers made into what `layers` read.

    Here, once for all of them, and not in a block: it depends on the data, which a compiled graph must not, and it
    would be computed again with every block that activation checkpointing recomputes.
    """
    ids = documents_of(carry)
    if ids is None or isinstance(ids, Documents):
        return carry
    needs = {need for layer in layers if isinstance(layer, Block) for need in layer.document_needs()}
    return (*carry[:2], Documents.of(ids, needs), *carry[3:])


def numbers_only(carry: Any) -> Any:
    """The inverse, for the next stage: only tensors travel between stages. Anything else (`LMOutput`) as it is."""
    if not isinstance(carry, tuple):
        return carry
    return tuple(x.ids if isinstance(x, Documents) else x for x in carry)


def _chunks(layers: Sequence[nn.Module], recompute: Recompute) -> list[list[nn.Module]]:
    """Consecutive blocks in groups of `recompute.every`; every other layer by itself."""
    chunks: list[list[nn.Module]] = []
    for layer in layers:
        room = chunks and isinstance(chunks[-1][-1], Block) and len(chunks[-1]) < recompute.every
        if room and recompute.active and isinstance(layer, Block):
            chunks[-1].append(layer)
        else:
            chunks.append([layer])
    return chunks


def _through(chunk: list[nn.Module]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(*carry: Any) -> tuple[Tensor, Tensor | None]:
        """(hidden behind the chunk, what its blocks add to the balance loss)"""
        if (before := balance_of(carry)) is not None:
            carry = (*carry[:-1], torch.zeros_like(before))
        for block in chunk:
            carry = block(carry)
        return carry[0], balance_of(carry)

    return run


def log_backends(module: nn.Module, state: ParallelState) -> None:
    """Rank 0 says which attention back-ends, and which code for Mamba, its layers use."""
    if state.rank != 0:
        return
    for what, kinds in (("attention back-end", SelfAttention), ("mamba", Mamba), ("mamba2", Mamba2)):
        names = sorted({str(part.choice) for part in module.modules() if isinstance(part, kinds)})
        if names:
            logger.info(f"{what}: {', '.join(names)}")


def recompute_of(layers: Sequence[nn.Module]) -> Recompute:
    """The recomputation its blocks were built for."""
    return next((layer.chunking for layer in layers if isinstance(layer, Block)), Recompute())


class SequentialModel(nn.Module):
    """All layers in one process (pipe_parallel_size 0 or 1; ZeRO 0-3).

    `layers` are built and initialised here from `seed` (None: zeros, a checkpoint follows). `objective` turns the
    head's output and the labels into a scalar. `after_build` is called with each layer before the next one is built:
    under ZeRO-3 it hands the layer's parameters to their owners, so that the model is never whole.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        objective: Any,
        seed: int | None,
        state: ParallelState,
        after_build: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        super().__init__()
        self.objective = objective
        built: list[nn.Module] = []
        for layer in layers:
            weight = built[0].word_embeddings.weight if layer.tied else None
            built.append(build_layer(layer, seed, state, weight=weight))
            if after_build is not None and weight is None:
                after_build(built[-1])
        self.sequential = nn.ModuleList(built)
        self.recompute = recompute_of(built)
        log_backends(self, state)

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        labels: Any = None,
        cache: KVCache | None = None,
        then: Then | None = None,
    ) -> Any:
        """inputs (tokens [b, s], positions [b, s][, doc_ids [b, s]]) -> the loss of `labels`, or `LMOutput` without.

        `then`: what to make of the `LMOutput` inside the head's forward (under ZeRO-3 its weight is whole only there),
        e.g. `lambda out: out.logits()`.
        """
        if labels is not None:
            then = partial(self._loss, labels)
        *body, head = self.sequential
        return head(run_layers(body, tuple(inputs), self.recompute, cache), then=then)

    def _loss(self, labels: Any, out: LMOutput) -> Tensor:
        return self.objective.loss(out, labels)
