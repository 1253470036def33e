"""A checkpoint with adapters, read as the model without adapters that computes the same."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, linalg

from megatron.checkpoint.base import adapters_of
from megatron.checkpoint.reader import CheckpointReader
from megatron.layers.lora import PARTS, Adapters
from megatron.mpu.sharding import ParamSpec, shard


def merged(reader: CheckpointReader) -> CheckpointReader:
    """The same reader where there are no adapters."""
    adapters = adapters_of(reader)
    return reader if adapters is None else MergedReader(reader, adapters)


class MergedReader(CheckpointReader):
    """Gives merged weights, in fp32, in place of those that have adapters. Reads no optimizer state."""

    def __init__(self, reader: CheckpointReader, adapters: Adapters) -> None:
        self._reader, self._adapters = reader, adapters
        self.checkpoint, self.folder = reader.checkpoint, reader.folder
        self.heads, self.tp_size = reader.heads, reader.tp_size
        parameters = reader.manifest.parameters
        self._adapted = {name.removesuffix(".lora.A") for name in parameters if name.endswith(".lora.A")}
        kept = {name: entry for name, entry in parameters.items() if not name.endswith(PARTS)}
        # What the adapters say is in the weights now.
        self.manifest = replace(reader.manifest, parameters=kept, config={**reader.manifest.config, "lora_r": None})

    @property
    def has_averages(self) -> bool:
        return self._reader.has_averages

    def use_averages(self) -> None:
        self._reader.use_averages()

    def weight(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        if layer == name or layer not in self._adapted:
            return self._reader.weight(name)
        a, b = (self._reader.weight(f"{layer}.lora.{part}").float() for part in "AB")
        whole = self._reader.weight(name).float() + self._adapters.scaling * b @ a
        if self._adapters.dora:
            magnitude = self._reader.weight(f"{layer}.lora.magnitude").float()
            whole *= (magnitude / linalg.vector_norm(whole, dim=1)).unsqueeze(1)
        return whole

    def master(self, name: str) -> Tensor:
        return self.weight(name)

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        local = shard(self.weight(name), spec, tp_rank, tp_size)
        return local.clone() if share is None else local.reshape(-1)[share.start : share.stop]

    def load_file(self, name: str) -> dict[str, object]:
        return self._reader.load_file(name)
