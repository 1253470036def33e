"""How a model knows the position of a token: rotary, learned, sinusoidal, ALiBi, relative or nothing.

Legend: b batch, s sequence, t = b·s, h hidden, n heads, d head dim, r rotated dims. `positions` is [b, s] int64 and
restarts at each document under intra-document masking, so every scheme indexes by it and never by the column.

A scheme may act in four places: added to the word embeddings, applied to queries and keys, as a slope on the attention
scores, or as a learned bias on them. `POSITIONS` maps `pos_emb` to the factories of those parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.layers.measure import size_of
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import Size
from megatron.registry import Registry, import_entries

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@dataclass(frozen=True)
class PositionScheme:
    """Factories of a scheme's parts; None where it does nothing.

    * `at_embedding(model, state)`: module, positions [b, s] -> [t, h] ([t/tp, h] under sequence parallelism).
    * `in_attention(model, state)`: module, (x [b, s, n, d], positions) -> the same shape.
    * `slopes(model)`: fp32 [n], one per query head: score(i, j) -= slope · (i - j).
    * `shared(model, state)`: module, () -> what the embedding hands to all layers (it travels with the hidden states),
      and `score_bias(model, shared, s, s_k)` -> [1, n/tp, s, s_k], what attention makes of it and adds to its scores.
    """

    at_embedding: Callable[[ModelConfig, ParallelState], nn.Module] | None = None
    in_attention: Callable[[ModelConfig, ParallelState], nn.Module] | None = None
    slopes: Callable[[ModelConfig], Tensor] | None = None
    shared: Callable[[ModelConfig, ParallelState], nn.Module] | None = None
    score_bias: Callable[[ModelConfig, Tensor, int, int], Tensor] | None = None


POSITIONS: Registry[PositionScheme] = Registry(
    "pos_emb",
    wants="a PositionScheme of megatron.layers.positions",
    fits=lambda entry: isinstance(entry, PositionScheme),
    fields=("table", "rotates"),
    measure=lambda name, model: _size(POSITIONS[name], model),
)
"""`PositionScheme`s. They index by `positions` alone, which restart in each document and skip padding; what acts in
attention is one module for all layers and has no parameters; parameters of `at_embedding` and `shared`
are made by `mpu.sharding.parameter`. Their row:

* `table=("max_position_embeddings", "hidden_size")`: the shape of that parameter, in model keys or numbers;
  None without one (a plugin may leave it out, then its parameters are counted);
* `rotates=True`: attention keeps rotated copies of queries and keys (for the estimate of memory).
"""


def _size(scheme: PositionScheme, model: ModelConfig) -> Size:
    makers = [make for make in (scheme.at_embedding, scheme.shared) if make is not None]
    return sum((size_of(lambda state, make=make: make(model, state)) for make in makers), Size())


class Table(nn.Module):
    """fp32 tables built once that stay fp32 when an engine casts the model (`model.bfloat16()`)."""

    def __init__(self, **tables: Tensor) -> None:
        super().__init__()
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Table:
        # A bf16 table would merge neighbouring positions: take the new device, not the new dtype.
        for name, table in list(self._buffers.items()):
            self._buffers[name] = table.to(fn(table.new_empty(0)).device)
        return self


import_entries(__name__, __path__)
