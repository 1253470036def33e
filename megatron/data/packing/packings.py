"""The registry of `pack_impl`. What a packing offers is in packing.py; documentation/packing.md says which to take."""

from __future__ import annotations

from megatron.data.packing.best_fit import BestFit
from megatron.data.packing.contract import Packing
from megatron.data.packing.overflow import PackUntilOverflow
from megatron.data.packing.packed import Packed
from megatron.data.packing.unpacked import Unpacked
from megatron.registry import Registry

PACKINGS: Registry[type[Packing]] = Registry(
    "pack_impl",
    wants="a subclass of megatron.data.packing.contract.Packing",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Packing),
)
"""Packings, subclasses of `Packing` that keep what its text says."""
PACKINGS.register("packed")(Packed)
PACKINGS.register("pack_until_overflow")(PackUntilOverflow)
PACKINGS.register("unpacked")(Unpacked)
PACKINGS.register("best_fit")(BestFit)
