"""Running a list of layers, and the whole network as one plain module. No DeepSpeed here.

Legend: b batch, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.layers.lora import start_adapters
from megatron.layers.parts import log_backends
from megatron.model.gpt import Layer, build_layer
from megatron.model.head import Head, Then
from megatron.model.recompute import Recompute, recompute_in_backward, recompute_of
from megatron.mpu.initial_weights import initialize
from megatron.mpu.state import ParallelState


def run_layers(
    layers: Sequence[nn.Module],
    carry: Carry,
    recompute: Recompute,
    cache: KVCache | None = None,
    before: Callable[[nn.Module], None] = lambda layer: None,
) -> Any:
    """Send the carry through `layers`; those with `uses_cache` get their entries of `cache`.

    Blocks recompute themselves one by one; chunks of several (`checkpoint_num_layers` > 1) are recomputed here.
    `before` is called with each layer before it runs, outside of compiled and recomputed code.
    """
    if cache is not None:
        entries = iter(cache.layers)
        for layer in layers:
            carry = layer(carry, next(entries)) if _is_block(layer) else layer(carry)
        return carry
    carry = carry.prepare_documents({need for block in _blocks(layers) for need in block.document_needs()})
    with next((block.fp8.region() for block in _blocks(layers)), nullcontext()):
        for chunk in _chunks(layers, recompute):
            for layer in chunk:
                before(layer)
            if len(chunk) == 1:
                carry = chunk[0](carry)
            else:
                carry = carry.replace_hidden(*recompute_in_backward(_run_chunk(chunk), recompute.policy, *carry))
            if _is_inner(chunk[-1]):
                # Not the same tensor: a stage that ends here sends both.
                carry = carry._replace(inner=carry.hidden.view_as(carry.hidden))
    return carry


def run_stage(
    layers: Sequence[nn.Module],
    carry: Carry,
    recompute: Recompute,
    cache: KVCache | None = None,
    then: Then | None = None,
    before: Callable[[nn.Module], None] = lambda layer: None,
) -> Any:
    """`run_layers` for a stage that may end with the head: then what `then` makes of its `LMOutput` (see `Head`)."""
    *body, last = layers
    if isinstance(last, Head):
        carry = run_layers(body, carry, recompute, cache, before)
        before(last)
        return last(carry, then=then)
    return run_layers(layers, carry, recompute, cache, before)


def _is_block(layer: nn.Module) -> bool:
    """Blocks alone keep what a cache needs; embedding, norm and head do not."""
    return getattr(layer, "uses_cache", False)


def _is_inner(layer: nn.Module) -> bool:
    """Whether the objective reads what this block gives."""
    return getattr(layer, "is_inner", False)


def _blocks(layers: Sequence[nn.Module]) -> list[Any]:
    return [layer for layer in layers if _is_block(layer)]


def _chunks(layers: Sequence[nn.Module], recompute: Recompute) -> list[list[nn.Module]]:
    """Consecutive blocks in groups of `recompute.every`; every other layer by itself."""
    chunks: list[list[nn.Module]] = []
    for layer in layers:
        open_chunk = chunks and _is_block(chunks[-1][-1]) and not _is_inner(chunks[-1][-1])
        room = open_chunk and len(chunks[-1]) < recompute.every
        if room and recompute.active and _is_block(layer):
            chunks[-1].append(layer)
        else:
            chunks.append([layer])
    return chunks


def _run_chunk(chunk: list[nn.Module]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(*fields: Any) -> tuple[Tensor, Tensor | None]:
        """(hidden behind the chunk, what its blocks add to the balance loss)"""
        carry = Carry(*fields)
        if carry.balance is not None:
            carry = carry._replace(balance=torch.zeros_like(carry.balance))
        for block in chunk:
            carry = block(carry)
        return carry.hidden, carry.balance

    return run


class SequentialModel(nn.Module):
    """All layers in one process (pipe_parallel_size 0 or 1; ZeRO 0-3).

    `layers` are built and initialised here from `seed` (None: zeros, a checkpoint follows). `objective(out, labels)`
    makes loss and metrics of the head's output and the labels. `after_build` is called with each layer before the next
    one is built: under ZeRO-3 it gives the layer's parameters to their owners, so that the model is never whole.
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
            built.append(build_layer(layer, seed if after_build is not None else None, state, weight=weight))
            if after_build is not None and weight is None:
                after_build(built[-1])
        self.sequential = nn.ModuleList(built)
        self.before_layer: Callable[[nn.Module], None] = lambda layer: None
        if seed is not None and after_build is None:
            initialize(self, seed, state)  # all at once: the ranks share the work
            start_adapters(self)
        self.recompute = recompute_of(built)
        log_backends(self, state)

    def forward(
        self,
        inputs: tuple[Any, ...],
        labels: Any = None,
        cache: KVCache | None = None,
        then: Then | None = None,
    ) -> Any:
        """inputs (tokens [b, s], positions [b, s][, doc_ids [b, s] or `Documents`]) -> what the
        objective makes of `labels`, or `LMOutput` without.

        `then`: what to make of the `LMOutput` inside the head's forward (under ZeRO-3 its weight is whole only there),
        e.g. `lambda out: out.logits()`.
        """
        if labels is not None:
            then = partial(self.objective, tensors=labels)
        carry = Carry.from_tensors(inputs)
        return run_stage(list(self.sequential), carry, self.recompute, cache, then, self.before_layer)
