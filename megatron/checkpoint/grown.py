"""The weights of a checkpoint for a model with more blocks or another vocabulary (`init_from`: `layer_map`, `vocab`).

A block of the new model starts as a copy of an old one. Of a vocabulary the rows that both have are taken; the others
are what a new model of this size and seed begins with, so they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.reader import CheckpointReader
from megatron.mpu.initial_weights import initial_value
from megatron.mpu.sharding import ParamSpec, shard

_FIRST_BLOCK = 2  # numbers of layers as in layout.py


@dataclass(frozen=True)
class Growth:
    """What is taken from where.

    Attributes:
        layer_map: for each block of this model the one of the checkpoint that it takes; None: the blocks are the same.
        resize: the vocabulary may have another size.
        seed: of this run, which draws new rows.
    """

    layer_map: tuple[int, ...] | None
    resize: bool
    seed: int

    @staticmethod
    def of(init: InitFrom | None, seed: int) -> Growth | None:
        """None when the model has the shapes of the checkpoint's."""
        return None if init is None or not init.grows else Growth(init.layer_map, init.vocab == "resize", seed)

    def sources(self, stored: Mapping[str, ParameterEntry]) -> dict[str, str]:
        """{name in this model: name in the checkpoint} of all that is stored."""
        if self.layer_map is None:
            return {name: name for name in stored}
        layers: dict[int, list[str]] = {}
        for name in stored:
            number, local = layout.split_name(name)
            layers.setdefault(number, []).append(local)
        behind, more = _FIRST_BLOCK + max(self.layer_map) + 1, len(self.layer_map) - max(self.layer_map) - 1
        places = [(_FIRST_BLOCK + new, _FIRST_BLOCK + old) for new, old in enumerate(self.layer_map)]
        places += [(old if old < behind else old + more, old) for old in layers if not _FIRST_BLOCK <= old < behind]
        return {f"{new}.{local}": f"{old}.{local}" for new, old in places for local in layers.get(old, ())}


class GrownReader(CheckpointReader):
    """The weights of a checkpoint under the names, and with the vocabulary, of a model that has these `shapes`. Reads
    no optimizer state."""

    def __init__(self, checkpoint: Checkpoint, growth: Growth, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(checkpoint, checksums=False)
        self._stored, self._growth = CheckpointReader(checkpoint, checksums=False), growth
        self.sources = growth.sources(checkpoint.manifest.parameters)
        entries = {name: checkpoint.manifest.parameters[old] for name, old in self.sources.items()}
        self._resized = {
            name: entry.shape[0]
            for name, entry in entries.items()
            # Only a vocabulary is padded.
            if growth.resize and entry.padded is not None and name in shapes
            if shapes[name][0] != entry.shape[0] and shapes[name][1:] == entry.shape[1:]
        }
        resized = {name: replace(entries[name], shape=shapes[name]) for name in self._resized}
        self.manifest = replace(self.manifest, parameters={**entries, **resized})

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        """See `CheckpointReader`."""
        source = self.sources[name]
        if name not in self._resized:
            return self._stored.local_weight(source, spec, tp_rank, tp_size, share)
        full, kept = initial_value(spec, name, self._growth.seed), min(self._resized[name], spec.shape[0])
        full[:kept] = self._stored.weight(source)[:kept]
        local = shard(full, spec, tp_rank, tp_size)
        return local.clone() if share is None else local.reshape(-1)[share.start : share.stop]

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """What parameters of this model are called in the checkpoint, as far as it has them."""
        return [self.sources[name] for name in names if name in self.sources]

    def describe(self) -> str:
        """What is not a copy, in one line."""
        parts = []
        if self._growth.layer_map is not None:
            parts.append(f"blocks are copies of the checkpoint's blocks {list(self._growth.layer_map)}")
        for name, before in self._resized.items():
            now = self.manifest.parameters[name].shape[0]
            fate = f"new (drawn with seed {self._growth.seed})" if now > before else "cut"
            low, high = sorted((now, before))
            parts.append(f"{name}: rows 0 to {low - 1} taken, {low} to {high - 1} {fate}")
        return "; ".join(parts) or "the vocabulary has the size of the checkpoint's"
