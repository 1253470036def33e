"""The list of layers as something that trains: a plain module, or one stage of a DeepSpeed pipeline.

`SequentialModel` lives in sequential.py, which does not import DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron.layers.carry import Carry
from megatron.layers.documents import Documents
from megatron.layers.lora import start_adapters
from megatron.layers.parts import log_backends
from megatron.model.block import Block
from megatron.model.gpt import Layer, build_layer
from megatron.model.partition import LayerRow, partition
from megatron.model.recompute import recompute_of
from megatron.model.sequential import SequentialModel, run_layers
from megatron.mpu.initial_weights import initialize
from megatron.mpu.state import ParallelState

__all__ = ["LayerPipe", "SequentialModel"]


class _Spec(LayerSpec):
    """Defers to `build_layer`; DeepSpeed only wants a module class to print."""

    def __init__(self, layer: Layer, state: ParallelState) -> None:
        super().__init__(nn.Module)
        self.layer, self.state = layer, state

    def build(self, log: bool = False) -> nn.Module:
        return build_layer(self.layer, None, self.state)


class _TiedSpec(TiedLayerSpec):
    """Embedding or head, whose `word_embeddings.weight` is one weight on two stages. Each stage builds its own layer;
    DeepSpeed sums the two gradients and counts the second copy as replicated."""

    def __init__(self, layer: Layer, state: ParallelState) -> None:
        super().__init__("embed", nn.Module, tied_weight_attr="word_embeddings.weight")
        self.layer, self.state = layer, state

    def build(self, log: bool = False) -> nn.Module:
        return build_layer(self.layer, None, self.state)


class LayerPipe(PipelineModule):
    """One stage of a DeepSpeed pipeline (pipe_parallel_size >= 2, ZeRO 0-1).

    Only this stage's layers are built. `LOCAL_RANK` must be in the environment and torch.distributed initialised with
    `state`'s world; DeepSpeed prints its own layer table to stdout (the caller silences it).

    `micro_batches`: "positions", and "documents" if they are kept apart, of the next micro-batches, one for each
    forward pass, from whoever has the batch: then no stage sends them. Where it ends, the stage before does.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        objective: Any,
        partition_method: str,
        seed: int | None,
        state: ParallelState,
    ) -> None:
        if state.pp_size < 2:
            raise ValueError("a pipeline has at least 2 stages; run one stage as a SequentialModel")
        tied = any(layer.tied for layer in layers)
        ends = {layers[0].index, layers[-1].index} if tied else set()
        specs = [(_TiedSpec if layer.index in ends else _Spec)(layer, state) for layer in layers]
        rows = [LayerRow(layer.index, layer.name) for layer in layers]
        # Set before DeepSpeed's constructor, which calls `_partition_layers` below.
        bounds = partition(rows, state.pp_size, partition_method, [layer.parameters for layer in layers])
        object.__setattr__(self, "bounds", bounds)
        super().__init__(
            layers=specs,
            topology=PipeModelDataParallelTopology(num_pp=state.pp_size, num_mp=state.tp_size, num_dp=state.dp_size),
            loss_fn=lambda out, labels: objective(out, labels)[0],
        )
        if seed is not None:
            initialize(self, seed, state)
            start_adapters(self)
        self.objective = objective
        self.before_layer: Callable[[nn.Module], None] = lambda layer: None
        self.micro_batches: Iterator[dict[str, Tensor | Documents]] = iter(())
        self.recompute = recompute_of(self.forward_funcs)
        self.carried = next(layer.carried for layer in self.forward_funcs if isinstance(layer, Block))
        log_backends(self, state)

    def _partition_layers(self, method: str = "") -> None:
        """Our partition in place of DeepSpeed's: every stage owns a block, and a dry run knows it without torch."""
        self.parts = self.bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """DeepSpeed's; with gradients torch warns of "silently incorrect behavior" at the first backward pass."""
        super()._synchronize_tied_weights()

    def forward(self, forward_input: Any) -> Any:
        """This stage's layers: the tensors of a carry (tokens or hidden first) -> the same; `LMOutput` at the end."""
        known = next(self.micro_batches, {})
        sent_on = [name for name in self.carried if name not in known]
        carry = Carry.from_tensors((*known.values(), *forward_input), (*known, *sent_on))
        out = run_layers(self.forward_funcs, carry, self.recompute, before=self.before_layer)
        if not isinstance(out, Carry):
            return out
        if out.shared is not None:
            out = out._replace(shared=out.shared.view_as(out.shared))  # what is sent on is not what was received
        if out.inner is not None and "inner" in self.carried:
            out = out._replace(inner=out.inner.view_as(out.inner))
        sent = [x for x in (out.hidden, out.balance, out.shared, out.inner) if x is not None and x.requires_grad]
        if len(sent) > 1:
            _backward_at_once(sent)
        return out._replace(**dict.fromkeys(known)).to_tensors()


def _backward_at_once(sent: list[Tensor]) -> None:
    """Make DeepSpeed's calls of `backward(gradient)` of the tensors that a stage sent, one by one in this order, one
    pass through the stage.

    It would keep the whole graph after the first and walk it once more for each other: more work, with every gradient
    hook and count of a layer done several times.
    """
    kept: list[Tensor] = []

    def backward(gradient: Tensor, retain_graph: bool = False) -> None:
        kept.append(gradient)
        if len(kept) == len(sent):
            for tensor in sent:
                del tensor.backward  # they hold each other
            torch.autograd.backward(sent, kept)

    for tensor in sent:
        tensor.backward = backward  # type: ignore[method-assign, assignment]
