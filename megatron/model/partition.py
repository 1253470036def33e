"""Which pipeline stage owns which layers. Needs neither torch nor a device, so a dry run shows the same table.

`pipe_partition_method`:

| value          | what is balanced                                                                       |
|----------------|----------------------------------------------------------------------------------------|
| type:REGEX     | the number of layers whose class name matches (any case); `type:transformer|mlp` = blocks |
| parameters     | the number of parameters                                                               |
| uniform        | the number of layers of any kind                                                       |
| explicit:3,3,2 | nothing: blocks per stage, first stage first                                           |

The embedding is always on the first stage, the final norm and the output matrix on the last, and every stage owns at
least one block: a stage without parameters makes ZeRO hang.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron.errors import UserError
from megatron.neox_arguments.block_sizes import BLOCK, GMLP, MAMBA, RWKV
from megatron.neox_arguments.formulas import head_size, parameter_count
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.registry import added

# Kind of mixer -> class name of its block, where that is not `TransformerBlock`.
BLOCK_NAMES: dict[str, str] = {
    **dict.fromkeys(MAMBA, "MambaBlock"),
    **dict.fromkeys(RWKV, "RwkvBlock"),
    **dict.fromkeys(GMLP, "GMLPBlock"),
}
BLOCKS = "type:transformer|mlp"  # GPT-NeoX's default: all blocks, whatever their kind is called
_AROUND = ("Embedding", "FinalNorm", "Head")


@dataclass(frozen=True)
class LayerRow:
    """One layer of the list: GPT-NeoX's number and the module's class name."""

    index: int
    name: str

    @property
    def is_block(self) -> bool:
        return self.name not in _AROUND


@dataclass(frozen=True)
class StageRow:
    """One stage: the layers it owns, as list positions [start, stop), and how many parameters they have."""

    stage: int
    start: int
    stop: int
    layers: tuple[LayerRow, ...]
    parameters: int | None


def layer_rows(model: ModelConfig) -> list[LayerRow]:
    """The list of layers: embedding, blocks, final norm, head (numbers 1 and L+2 hold no parameters in GPT-NeoX)."""
    kinds = model.attention_config
    names = BLOCK_NAMES | {kind: block.__name__ for kind, block in added(BLOCK).items()}
    blocks = [LayerRow(i, names.get(kind, "TransformerBlock")) for i, kind in enumerate(kinds, start=2)]
    return [LayerRow(0, "Embedding"), *blocks, LayerRow(len(kinds) + 3, "FinalNorm"), LayerRow(len(kinds) + 4, "Head")]


def layer_parameters(model: ModelConfig, vocab_size: int) -> list[int]:
    """Parameters of each layer over the real vocabulary; a tied head counts the copy its stage holds."""
    count = parameter_count(model, vocab_size)
    blocks = (block.total for block in count.blocks)
    return [count.embedding, *blocks, count.final_norm, head_size(model, vocab_size)]


def partition(rows: Sequence[LayerRow], stages: int, method: str, parameters: Sequence[int] | None = None) -> list[int]:
    """List positions [0, ..., len(rows)] where stages begin and the last one ends: stage i owns bounds[i]:bounds[i+1].

    `parameters`: parameters of each layer, needed by the method "parameters".
    Raises `UserError` for an unknown method, or when a stage would own no block.
    """
    blocks = sum(row.is_block for row in rows)
    if blocks < stages:
        raise UserError(
            f"pipe_parallel_size: {stages} stages for num_layers={blocks} leave a stage without a block; "
            f"use at most {blocks} stages"
        )
    if method.startswith("explicit:"):
        counts = _explicit(method, blocks, stages)
    else:
        counts = _balanced(_weights(rows, method, parameters), stages)
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return [0, *(bound + 1 for bound in bounds[1:-1]), len(rows)]


def stage_table(
    rows: Sequence[LayerRow], bounds: Sequence[int], parameters: Sequence[int] | None = None
) -> list[StageRow]:
    """One row per stage, for people (dry run) and tools."""
    return [
        StageRow(
            stage, start, stop, tuple(rows[start:stop]), None if parameters is None else sum(parameters[start:stop])
        )
        for stage, (start, stop) in enumerate(pairwise(bounds))
    ]


def _weights(rows: Sequence[LayerRow], method: str, parameters: Sequence[int] | None) -> list[int]:
    """Weight of each block for the method; what is not a block adds to the first or the last one."""
    lowered = method.lower()
    if lowered == "uniform":
        weights = [1] * len(rows)
    elif lowered == "parameters":
        if parameters is None:
            raise ValueError("the method 'parameters' needs the parameters of each layer")
        weights = list(parameters)
    elif lowered.startswith("type:"):
        try:
            pattern = re.compile(method.partition(":")[2], re.IGNORECASE)
        except re.error as error:
            raise UserError(f"pipe_partition_method: {method!r} is not a regular expression: {error}") from error
        every_block = lowered == BLOCKS
        weights = [int((every_block and row.is_block) or pattern.search(row.name) is not None) for row in rows]
        if not any(weights):
            names = ", ".join(dict.fromkeys(row.name for row in rows))
            raise UserError(f"pipe_partition_method: {method!r} matches no layer; layers are {names}")
    else:
        raise UserError(
            f"pipe_partition_method: {method!r} is not known; use type:transformer|mlp, parameters, uniform or "
            "explicit:N,N,... (blocks per stage)"
        )
    first, *middle, norm, head = weights
    middle[0] += first
    middle[-1] += norm + head
    return middle


def _explicit(method: str, blocks: int, stages: int) -> list[int]:
    text = method.partition(":")[2]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"pipe_partition_method: {method!r}: write blocks per stage as explicit:3,3,2, each at least 1")
    counts = [int(part) for part in parts]
    if len(counts) != stages or sum(counts) != blocks:
        raise UserError(
            f"pipe_partition_method: {method!r} names {len(counts)} stages with {sum(counts)} blocks; the model has "
            f"pipe_parallel_size={stages} and num_layers={blocks}"
        )
    return counts


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """Blocks per stage (each at least 1) such that the heaviest stage is lightest, then the squares of the weights are
    least (which spreads what is left), then earlier stages take more."""
    lightest, _ = _best(weights, stages, lambda weight, rest: max(weight, rest))
    _, counts = _best(weights, stages, lambda weight, rest: weight**2 + rest if weight <= lightest else math.inf)
    return counts


def _best(weights: Sequence[int], stages: int, cost: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """The least cost of dealing all blocks to `stages`, and the counts; `cost(a stage's weight, the rest's cost)`."""
    total = [0, *accumulate(weights)]
    end = len(weights)
    costs = [cost(total[end] - total[start], 0) for start in range(end)]  # one stage takes all from `start` on
    picks: list[list[int]] = [[end] * end]
    for later in range(1, stages):
        row, pick = [math.inf] * end, [end] * end
        for start in range(end - later):
            for stop in range(end - later, start, -1):
                here = cost(total[stop] - total[start], costs[stop])
                if here < row[start]:
                    row[start], pick[start] = here, stop
        costs, picks = row, [pick, *picks]
    counts, start = [], 0
    for pick in picks:
        counts.append(pick[start] - start)
        start = pick[start]
    return costs[0], counts
