"""The weights of a checkpoint for a model with more blocks or another vocabulary (`init_from`: `layer_map`, `vocab`),
or with a head of rewards on a language model (`train_impl: rm`).

A block of the new model starts as a copy of an old one. Of a vocabulary the rows that both have are taken; the others,
and a new head, are what a new model of this size and seed begins with, so they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.reader import CheckpointReader
from megatron.model.head import REWARD, TIED_NAME
from megatron.mpu.initial_weights import initial_value
from megatron.mpu.sharding import ParamSpec, shard

T = TypeVar("T")

_FIRST_BLOCK = 2  # numbers of layers as in layout.py


@dataclass(frozen=True)
class Growth:
    """What is taken from where.

    Attributes:
        layer_map: for each block of this model the one of the checkpoint that it takes; None: the blocks are the same.
        resize: the vocabulary may have another size.
        seed: of this run, which draws new rows.
        new_head: where the checkpoint has no head of rewards, its output matrix is left out, and the head is new.
    """

    layer_map: tuple[int, ...] | None
    resize: bool
    seed: int
    new_head: bool = False

    @staticmethod
    def of(init: InitFrom | None, seed: int, new_head: bool = False) -> Growth | None:
        """None when the model has the shapes of the checkpoint's."""
        if init is None or not init.grows:
            return Growth(None, False, seed, True) if new_head else None
        return Growth(init.layer_map, init.vocab == "resize", seed, new_head)

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
    """The weights that `stored` reads under the names, and with the vocabulary, of a model that has these `shapes`.
    Reads no optimizer state."""

    def __init__(self, stored: CheckpointReader, growth: Growth, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.checkpoint, self.folder = stored.checkpoint, stored.folder
        self.heads, self.tp_size = stored.heads, stored.tp_size
        self._stored, self._growth = stored, growth
        there = stored.manifest.parameters
        self.sources = growth.sources(there)
        heads = [name for name in shapes if name.endswith(REWARD) and name not in self.sources]
        self._new = {name: shapes[name] for name in heads if growth.new_head}
        if self._new:
            self.sources = without_output_matrix(self.sources)
        entries = {name: there[old] for name, old in self.sources.items()}
        self._resized = {
            name: entry.shape[0]
            for name, entry in entries.items()
            # Only a vocabulary is padded.
            if growth.resize and entry.padded is not None and name in shapes
            if shapes[name][0] != entry.shape[0] and shapes[name][1:] == entry.shape[1:]
        }
        resized = {name: replace(entries[name], shape=shapes[name]) for name in self._resized}
        kind = there[TIED_NAME].dtype if self._new else ""
        new = {name: ParameterEntry(shape, 1, (), None, kind) for name, shape in self._new.items()}
        self.manifest = replace(stored.manifest, parameters={**entries, **resized, **new})

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        """See `CheckpointReader`."""
        if name not in self._resized and name not in self._new:
            return self._stored.local_weight(self.sources[name], spec, tp_rank, tp_size, share)
        full = initial_value(spec, name, self._growth.seed)
        if name in self._resized:
            kept = min(self._resized[name], spec.shape[0])
            full[:kept] = self._stored.weight(self.sources[name])[:kept]
        local = shard(full, spec, tp_rank, tp_size)
        return local.clone() if share is None else local.reshape(-1)[share.start : share.stop]

    def state(self) -> dict[str, Any]:
        """See `CheckpointReader`."""
        return self._stored.state()

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """What parameters of this model are called in the checkpoint, as far as it has them."""
        return [self.sources[name] for name in names if name in self.sources]

    def describe(self) -> str:
        """What is not a copy, in one line."""
        parts = [f"{name}: new (drawn with seed {self._growth.seed})" for name in self._new]
        if self._growth.layer_map is not None:
            parts.append(f"blocks are copies of the checkpoint's blocks {list(self._growth.layer_map)}")
        for name, before in self._resized.items():
            now = self.manifest.parameters[name].shape[0]
            fate = f"new (drawn with seed {self._growth.seed})" if now > before else "cut"
            low, high = sorted((now, before))
            parts.append(f"{name}: rows 0 to {low - 1} taken, {low} to {high - 1} {fate}")
        same = "the vocabulary has the size of the checkpoint's" if self._growth.resize else "no parameter is new"
        return "; ".join(parts) or same


def without_output_matrix(named: Mapping[str, T]) -> dict[str, T]:
    """What is named by parameter, without that of a language model's own output matrix."""
    return {name: of for name, of in named.items() if not layout.split_name(name)[1].startswith("final_linear.")}
