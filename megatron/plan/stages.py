"""Which rank is where, and which layers and how many parameters each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from megatron.model.partition import LayerRow, StageRow, layer_parameters, layer_rows, partition, stage_table
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import Size, has_value_embeddings
from megatron.neox_arguments.formulas import ParameterCount, head_size, parameter_count, round_up
from megatron.neox_arguments.parameter_rules import parse_rules
from megatron.neox_arguments.schema_model import ModelConfig

if TYPE_CHECKING:
    from megatron.mpu.sharding import ParamSpec


@dataclass(frozen=True)
class LayerSize:
    """Parameters of one layer: of the whole model, as one rank holds them in memory, and those of `local` that are
    experts'."""

    full: int
    local: int
    experts: int = 0


@dataclass(frozen=True)
class Held:
    """Parameters that one rank of a stage holds, padding and tied copies too, and how many of them are experts', and
    in blocks; the same of those that are trained (None: all)."""

    parameters: float
    experts: float = 0
    blocks: float = 0
    trained: Held | None = None


def topology(args: NeoXArgs, *, experts: bool = False) -> Topology:
    """The layout of a derived config, outermost axis first, as the ranks build it.

    `experts`: the data axis as "expert_data" x "expert", where expert parallelism divides it.
    """
    parallel = args.parallel
    found = Topology(
        {
            "pipe": max(1, parallel.pipe_parallel_size),
            "data": parallel.data_parallel_size,
            "model": parallel.model_parallel_size,
        }
    )
    if not experts or parallel.expert_parallel_size == 1:
        return found
    sharing = parallel.expert_parallel_size
    return found.refined("data", {"expert_data": parallel.data_parallel_size // sharing, "expert": sharing})


def layer_sizes(model: ModelConfig, vocab_size: int, padded_vocab_size: int, tp: int, ep: int = 1) -> list[LayerSize]:
    """One entry per layer of `layer_rows`: embedding, blocks, final norm, head.

    A tied output matrix counts with the embedding only; see `stage_sizes` for the copy that a last stage holds.
    """
    total = parameter_count(model, vocab_size)
    h = model.hidden_size
    positions = total.embedding - vocab_size * h
    matrix = LayerSize(vocab_size * h, padded_vocab_size * h // tp)
    return [
        LayerSize(matrix.full + positions, matrix.local + positions),
        *(LayerSize(block.total, block.local(tp, ep), block.experts // (tp * ep)) for block in total.blocks),
        LayerSize(total.final_norm, total.final_norm),
        _head(model, vocab_size, padded_vocab_size, tp),
    ]


def _head(model: ModelConfig, vocab_size: int, padded_vocab_size: int, tp: int) -> LayerSize:
    """The output matrix and its bias, where they are not the embedding's."""
    if model.ties_head:
        return LayerSize(0, 0)
    return LayerSize(head_size(model, vocab_size), head_size(model, padded_vocab_size) // tp)


def stage_sizes(args: NeoXArgs, vocab_size: int) -> tuple[list[StageRow], list[Held]]:
    """The stage table and, per stage, what one of its ranks holds."""
    model, tp, ep = args.model, args.parallel.model_parallel_size, args.parallel.expert_parallel_size
    padded = args.tokenizer.padded_vocab_size or padded_vocabulary(args, vocab_size)
    sizes = layer_sizes(model, vocab_size, padded, tp, ep)
    full = [layer.full for layer in sizes]
    rows = layer_rows(model)
    stages = max(1, args.parallel.pipe_parallel_size)
    # Weighed as the run weighs them (a tied head counts its copy), so that both show the same stages.
    weights = layer_parameters(model, vocab_size)
    table = stage_table(rows, partition(rows, stages, args.parallel.pipe_partition_method, weights), full)
    copy = padded * model.hidden_size // tp if stages > 1 and model.ties_head else 0  # on the last stage
    held = []
    for stage in table:
        layers = sizes[stage.start : stage.stop]
        total = sum(layer.local for layer in layers) + (copy if stage is table[-1] else 0)
        blocks = sum(
            layer.local - _tables(model, placed, vocab_size) // tp
            for layer, placed in zip(layers, stage.layers, strict=True)
            if placed.is_block
        )
        held.append(Held(total, sum(layer.experts for layer in layers), blocks))
    if freezes(args):
        held = [_with_frozen(args, vocab_size, stage, one) for stage, one in zip(table, held, strict=True)]
    return table, held


def _tables(model: ModelConfig, block: LayerRow, vocab_size: int) -> int:
    """Parameters of a block's value embeddings, of which optimizers keep what they keep of the word embeddings."""
    if not has_value_embeddings(model, block.index - 2):
        return 0
    assert model.num_kv_heads is not None and model.head_dim is not None  # derived
    return vocab_size * model.num_kv_heads * model.head_dim


def freezes(args: NeoXArgs) -> bool:
    """Whether some parameters are not trained."""
    rules, post = parse_rules(args.optimizer.parameter_groups), args.post
    return post.lora_r is not None or bool(post.ga_rmu_layers) or any(rule.freeze for rule in rules)


def _with_frozen(args: NeoXArgs, vocab_size: int, stage: StageRow, held: Held) -> Held:
    """What the ranks of a stage hold with adapters, and how much of it is trained."""
    parallel = args.parallel
    layers = {layer.index for layer in stage.layers}
    in_blocks = {layer.index for layer in stage.layers if layer.is_block}
    copies = {0} if any(layer.name == "Head" for layer in stage.layers) and args.model.ties_head else set()
    added = trained = experts = blocks = 0
    for name, spec, is_adapter, is_trained in parameters(args, vocab_size):
        layer = int(name.partition(".")[0])
        if layer not in layers and not (layer in copies and name.endswith("word_embeddings.weight")):
            continue
        if spec.padded is not None:
            spec = replace(spec, padded=args.tokenizer.padded_vocab_size)
        size = prod(spec.local_shape(parallel.model_parallel_size, parallel.expert_parallel_size))
        added += size if is_adapter else 0
        if is_trained:
            trained += size
            experts += size if spec.experts else 0
            blocks += size if layer in in_blocks and spec.kind != "embedding" else 0
    return Held(held.parameters + added, held.experts, held.blocks + added, Held(trained, experts, blocks))


def parameters(args: NeoXArgs, vocab_size: int) -> Iterator[tuple[str, ParamSpec, bool, bool]]:
    """Canonical name and declaration of each of the whole model, whether it is an adapter's, and whether it is
    trained."""
    from megatron.layers.lora import PARTS, Adapters  # these need torch, and only here
    from megatron.model.specs import model_specs
    from megatron.optim.groups import is_frozen, trained_rules

    rules = trained_rules(args.optimizer, args.post)
    for name, spec in model_specs(args.model, vocab_size, Adapters.of(args.post)).items():
        yield name, spec, name.endswith(PARTS), not is_frozen(spec, rules)


def trained_parameters(args: NeoXArgs, vocab_size: int) -> tuple[int, int]:
    """(What is trained, all) of the whole model with its adapters."""
    sizes = [(prod(spec.shape), is_trained) for _, spec, _, is_trained in parameters(args, vocab_size)]
    return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)


def saved_parameters(args: NeoXArgs, vocab_size: int, *, begins_anew: bool) -> ParameterCount:
    """What a checkpoint holds; `begins_anew`: no other checkpoint has the frozen weights of adapters."""
    if args.post.lora_r is None:
        return parameter_count(args.model, vocab_size)
    every = begins_anew or args.post.lora_save_base
    inside = outside = 0
    for name, spec, is_adapter, is_trained in parameters(args, vocab_size):
        if every or is_adapter or is_trained:
            in_block = 2 <= int(name.partition(".")[0]) < args.model.num_layers + 2
            inside, outside = inside + prod(spec.shape) * in_block, outside + prod(spec.shape) * (not in_block)
    return ParameterCount(embedding=outside, blocks=(Size(inside, 0),), final_norm=0, head=0)


def padded_vocabulary(args: NeoXArgs, vocab_size: int) -> int:
    """Rows of the embedding in memory."""
    return round_up(vocab_size, args.tokenizer.make_vocab_size_divisible_by * args.parallel.model_parallel_size)
