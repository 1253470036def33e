"""No positions: only the causal mask tells one token from another."""

from megatron.layers.positions import POSITIONS, PositionScheme

POSITIONS.register("none", table=None, doc="Nothing; the causal mask alone orders tokens.")(PositionScheme())
