"""Which rank is where, and which layers and how many parameters each pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.model.partition import StageRow, layer_parameters, layer_rows, partition, stage_table
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.formulas import parameter_count, round_up
from megatron.neox_arguments.schema_model import ModelConfig


@dataclass(frozen=True)
class LayerSize:
    """Parameters of one layer: of the whole model, and as one tensor-parallel rank holds them in memory."""

    full: int
    local: int


def topology(args: NeoXArgs) -> Topology:
    """The layout of a derived config, outermost axis first, as the ranks build it."""
    parallel = args.parallel
    return Topology(
        {
            "pipe": max(1, parallel.pipe_parallel_size),
            "data": parallel.data_parallel_size,
            "model": parallel.model_parallel_size,
        }
    )


def layer_sizes(model: ModelConfig, vocab_size: int, padded_vocab_size: int, tp: int) -> list[LayerSize]:
    """One entry per layer of `layer_rows`: embedding, blocks, final norm, head.

    A tied output matrix counts with the embedding only; see `stage_sizes` for the copy that a last stage holds.
    """
    total = parameter_count(model, vocab_size)
    h = model.hidden_size
    positions = total.embedding - vocab_size * h
    matrix = LayerSize(vocab_size * h, padded_vocab_size * h // tp)
    return [
        LayerSize(matrix.full + positions, matrix.local + positions),
        *(LayerSize(block.total, block.local(tp)) for block in total.blocks),
        LayerSize(total.final_norm, total.final_norm),
        _head(model, vocab_size, padded_vocab_size, tp),
    ]


def _head(model: ModelConfig, vocab_size: int, padded_vocab_size: int, tp: int) -> LayerSize:
    """The output matrix and its bias, where they are not the embedding's."""
    width = model.hidden_size + model.use_bias_in_head if model.no_weight_tying else 0
    return LayerSize(vocab_size * width, padded_vocab_size * width // tp)


def stage_sizes(args: NeoXArgs, vocab_size: int) -> tuple[list[StageRow], list[int]]:
    """The stage table and, per stage, the parameters that one of its ranks holds (padding and tied copies too)."""
    model, tp = args.model, args.parallel.model_parallel_size
    padded = args.tokenizer.padded_vocab_size or padded_vocabulary(args, vocab_size)
    sizes = layer_sizes(model, vocab_size, padded, tp)
    full = [layer.full for layer in sizes]
    rows = layer_rows(model)
    stages = max(1, args.parallel.pipe_parallel_size)
    # Weighed as the run weighs them (a tied head counts its copy), so that both show the same stages.
    weights = layer_parameters(model, vocab_size)
    table = stage_table(rows, partition(rows, stages, args.parallel.pipe_partition_method, weights), full)
    local = [sum(layer.local for layer in sizes[stage.start : stage.stop]) for stage in table]
    if stages > 1 and not model.no_weight_tying:
        local[-1] += padded * model.hidden_size // tp  # the last stage's copy of the tied matrix
    return table, local


def padded_vocabulary(args: NeoXArgs, vocab_size: int) -> int:
    """Rows of the embedding in memory."""
    return round_up(vocab_size, args.tokenizer.make_vocab_size_divisible_by * args.parallel.model_parallel_size)
