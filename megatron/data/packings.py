"""The registry of `pack_impl`."""

from __future__ import annotations

from megatron.data.packed import Packed
from megatron.data.packing import Packing
from megatron.registry import Registry

PACKINGS: Registry[type[Packing]] = Registry("pack_impl")
PACKINGS.register("packed")(Packed)
