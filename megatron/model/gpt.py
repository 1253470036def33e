"""THE network: one function that returns the list of its layers.

Whoever runs them (pipe.py, inference) builds only those of its stage. Layers are numbered as in GPT-NeoX, whose list
has two reshaping functions that hold no parameters: 0 embedding, 2 .. L+1 blocks, L+3 final norm, L+4 output matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from torch import nn

from megatron.layers.embedding import Embedding
from megatron.layers.lora import Adapters, add_adapters, start_adapters
from megatron.layers.parts import BlockSpec
from megatron.layers.positions import POSITIONS
from megatron.model import gmlp_block, mamba_block, rwkv_block
from megatron.model.block import BLOCKS, TransformerBlock
from megatron.model.head import TIED_NAME, FinalNorm, Head
from megatron.model.partition import layer_parameters, layer_rows
from megatron.mpu import initial_weights, sharding
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import has_value_embeddings

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

PROVIDERS = (gmlp_block, mamba_block, rwkv_block)  # importing them is what fills the registry of blocks


@dataclass(frozen=True)
class Layer:
    """One layer before it is built.

    * `index`: GPT-NeoX's number; `name`: the module's class name, which `pipe_partition_method: type:REGEX` matches.
    * `build()`: makes the module, parameters zero; a tied layer takes `build(weight=parameter)` and shares it.
    * `parameters`: how many, over the real vocabulary (a tied head counts its copy).
    * `tied`: canonical name of the parameter this layer's weight is tied to (the head's), else None.
    """

    index: int
    build: Callable[..., nn.Module]
    name: str
    parameters: int
    tied: str | None = None


def gpt_layers(
    model: ModelConfig,
    *,
    vocab_size: int,
    padded_vocab_size: int,
    state: ParallelState,
    adapters: Adapters | None = None,
    inner: int | None = None,
) -> list[Layer]:
    """The layers of the whole network, in order. Builds nothing yet. `model` must be derived (no None sizes).

    `adapters`: of its linear layers, which `Layer.parameters` does not count. `inner`: the block, from 0, whose output
    goes to the head as well (`Carry.inner`).
    """
    parts = list(zip(model.attention_config, model.layer_mlps, model.layer_windows, strict=True))

    @cache
    def rotary(local: bool) -> nn.Module | None:
        # One set of tables for all layers of this process, or one for those with a window and one for the others.
        make = POSITIONS[model.pos_emb].in_attention
        turned = replace(model, rotary_emb_base=model.rotary_emb_base_local, rope_scaling=None) if local else model
        return None if make is None else make(turned, state)

    vocabulary = {"vocab_size": vocab_size, "padded_vocab_size": padded_vocab_size}
    builders: list[Callable[..., nn.Module]] = [
        partial(Embedding, model, state, **vocabulary),
        *(
            partial(
                _build_block,
                model,
                state,
                rotary,
                BlockSpec(layer, kind, mlp, window, vocabulary=vocab_size * has_value_embeddings(model, layer)),
            )
            for layer, (kind, mlp, window) in enumerate(parts)
        ),
        partial(FinalNorm, model, state),
        partial(Head, model, state, **vocabulary),
    ]
    if adapters is not None:
        builders[1:-2] = [
            partial(_with_adapters, build, index, adapters) for index, build in enumerate(builders[1:-2], start=2)
        ]
    if inner is not None:
        builders[1:-2] = [partial(_with_inner, build, block - inner) for block, build in enumerate(builders[1:-2])]
    rows = layer_rows(model)
    tied = TIED_NAME if model.ties_head else None
    return [
        Layer(row.index, build, row.name, parameters, tied if row.name == "Head" else None)
        for row, build, parameters in zip(rows, builders, layer_parameters(model, vocab_size), strict=True)
    ]


def _build_block(
    model: ModelConfig, state: ParallelState, rotary: Callable[[bool], nn.Module | None], spec: BlockSpec
) -> nn.Module:
    block = BLOCKS[spec.kind] if spec.kind in BLOCKS else TransformerBlock  # noqa: SIM401 (a registry has no get)
    local = spec.window is not None and model.rotary_emb_base_local is not None
    return block(model, state, replace(spec, rotary=rotary(local)))


def _with_adapters(build: Callable[..., nn.Module], index: int, adapters: Adapters) -> nn.Module:
    block = build()
    add_adapters(block, index, adapters)
    return block


def _with_inner(build: Callable[..., nn.Module], distance: int) -> nn.Module:
    """`distance`: how many blocks behind the one whose output is kept."""
    block = build()
    block.is_inner = distance == 0
    if distance > 0:
        block.carried = (*block.carried, "inner")
    return block


def build_layer(
    layer: Layer, seed: int | None, state: ParallelState, *, weight: nn.Parameter | None = None
) -> nn.Module:
    """Build a layer, name its parameters and fill them from `seed` (None: leave zeros, a checkpoint follows).

    `weight`: the parameter a tied layer shares; it keeps its name and value.
    """
    if weight is not None:
        return layer.build(weight=weight)
    module = layer.build()
    sharding.bind(module, layer.index)
    if seed is not None:
        initial_weights.initialize(module, seed, state)
        start_adapters(module)
    return module
