"""Reads a checkpoint of any layout, one parameter at a time.

The tensor files are mapped into memory, so only what is used is read. What comes back is in memory row order
(neox_layout.py), either whole ("full") or cut for the tensor-parallel rank that asks ("local").
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint, advise_others
from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.neox_layout import Heads, from_disk, to_disk
from megatron.checkpoint.neox_names import stored_name
from megatron.errors import UserError
from megatron.mpu.sharding import ParamSpec, shard, unshard, zeros
from megatron.neox_arguments.optimizer_params import KIND
from megatron.optim.ema import EMA
from megatron.optim.matrices import WHOLE
from megatron.registry import added
from megatron.rows import row, rows

WEIGHT = "weight"


class CheckpointReader:
    """The content of one opened checkpoint. Raises `UserError` for a GPT-NeoX checkpoint (see neox_reader.py).

    `checksums`: compare each file with its checksum before its first use, which reads it once from start to end; its
    pages are in memory then.
    """

    _averaged = False

    def __init__(self, checkpoint: Checkpoint, *, checksums: bool = True) -> None:
        self.checkpoint, self.folder, self.manifest = checkpoint, checkpoint.path, checkpoint.manifest
        self._checksums = checksums
        if checkpoint.by_neox:
            raise UserError(f"{self.folder} was written by GPT-NeoX: reading its weights needs the run's config")
        if checkpoint.published is not None:
            raise UserError(f"{self.folder} is a Hugging Face model; this takes a checkpoint")
        self.heads = Heads(**self.manifest.heads)
        self.tp_size = self.manifest.layout["tp"]
        self._files: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._checked: set[str] = set()

    @property
    def has_averages(self) -> bool:
        """Whether the run kept moving averages of its weights (`ema_decay`), and its optimizer's files are there."""
        return self.manifest.optimizer and self.manifest.config.get("ema_decay") is not None

    @property
    def _holds_averages(self) -> bool:
        """Whether files of weights hold what the optimizer averages itself; of a plugin's only when it is loaded."""
        kind = self.manifest.config.get("optimizer_type")
        return (kind in rows(KIND) or kind in added(KIND)) and bool(row(KIND, kind).get("averages"))

    def use_averages(self) -> None:
        """From now on weights are their averages (moving ones in fp32); those of parameters that were not trained are
        themselves. Raises `UserError` when the checkpoint has none."""
        if self._holds_averages:
            return
        if not self.has_averages:
            raise UserError(
                f"{self.folder} has no average of the weights: the run needs ema_decay, and no no_save_optim"
            )
        self._averaged = True

    def names(self) -> list[str]:
        """Canonical names of all parameters, by layer."""
        return sorted(self.manifest.parameters, key=layout.parameter_order)

    def entry(self, name: str) -> ParameterEntry:
        """Shape and division of a parameter. Raises `UserError` when the checkpoint has no such parameter."""
        if name not in self.manifest.parameters:
            raise UserError(f"{self.folder} has no parameter {name}")
        return self.manifest.parameters[name]

    def dtype(self, name: str) -> torch.dtype:
        """Type of the weight files (the training precision)."""
        return getattr(torch, self.entry(name).dtype)

    def weight(self, name: str) -> Tensor:
        """The full weight, in the stored type."""
        return self._full(name, lambda rank: self._weights(name, rank))

    def master(self, name: str) -> Tensor:
        """The full weight in fp32, as the optimizer goes on with it, where that is stored and not another than those to
        be evaluated; else `weight`."""
        if not self.manifest.optimizer or self._holds_averages:
            return self.weight(name)
        return self._full(name, lambda rank: self._moments(name, rank)[WEIGHT])

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        """The part of the weight that rank `tp_rank` of `tp_size` holds as declared by `spec`; with `share` those
        elements of it, 1-D, perhaps in the mapped file itself, of which no more than their rows is read."""
        return self._local(name, spec, tp_rank, tp_size, lambda rank: self._weights(name, rank), share)

    def optimizer_keys(self, name: str) -> list[str]:
        """Names of the stored optimizer tensors of a parameter; `weight` is the fp32 master."""
        return sorted(self._moments(name, 0))

    def local_optimizer(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> dict[str, Tensor]:
        """Master weight and moments for rank `tp_rank` of `tp_size`, whole or of a `share` as in `local_weight`."""
        found = {}
        for key in self.optimizer_keys(name):
            if self._shaped_like_parameter(name, self._moments(name, 0)[key]):
                found[key] = self._local(
                    name, spec, tp_rank, tp_size, lambda rank, key=key: self._moments(name, rank)[key], share
                )
            elif key.startswith(WHOLE) or self._moments(name, 0)[key].numel() == 1:
                found[key] = self._moments(name, 0)[key].clone()
            elif tp_size == self.tp_size:
                found[key] = self._moments(name, tp_rank)[key].clone()
            else:
                raise UserError(
                    f"{self.folder}: optimizer state {key} of {name} is not shaped like its parameter, so it cannot "
                    f"be cut for another; load at model_parallel_size {self.tp_size}, or set no_load_optim "
                    "(init_from.optimizer=reset)"
                )
        return found

    def state(self) -> dict[str, Any]:
        """Counters and client state, as `save_checkpoint` was given them."""
        return self.load_file(layout.state_file(0))

    def load_file(self, name: str) -> dict[str, Any]:
        """One file, mapped into memory and read with `weights_only`. Raises `UserError` when it is damaged."""
        if self._checksums and name not in self._checked:
            if problem := self.manifest.wrong_file(self.folder, name):
                raise UserError(f"{self.folder} is damaged: {problem}. {advise_others(self.folder)}")
            self._checked.add(name)
        path = self.folder / name
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # nonsense makes zipfile and pickle raise nearly anything
            raise UserError(f"{path} cannot be read: {error}. {advise_others(self.folder)}") from error
        if not isinstance(content, dict):
            raise UserError(f"{path} cannot be read: it does not hold a mapping. {advise_others(self.folder)}")
        return content

    def spec(self, name: str) -> ParamSpec:
        """The declaration of a parameter, as far as the manifest has it (enough to cut and to join)."""
        entry = self.entry(name)
        return ParamSpec(
            name=name,
            shape=entry.shape,
            init=zeros,
            split_dim=entry.split_dim,
            blocks=entry.blocks,
            padded=entry.padded,
        )

    def _full(self, name: str, part: Callable[[int], Tensor]) -> Tensor:
        spec = self.spec(name)
        ranks = range(self.tp_size) if spec.split_dim is not None else range(1)
        parts = [from_disk(self._checked_part(spec, part, rank), spec, self.heads, self.tp_size) for rank in ranks]
        return unshard(parts, spec)

    def _local(
        self,
        name: str,
        spec: ParamSpec,
        tp_rank: int,
        tp_size: int,
        part: Callable[[int], Tensor],
        share: range | None,
    ) -> Tensor:
        stored, shape = self.spec(name), spec.local_shape(tp_size)
        if spec.shape != stored.shape:
            raise UserError(
                f"{self.folder}: {name} has shape {list(stored.shape)}, this model wants {list(spec.shape)}"
            )
        if not shape:
            return self._full(name, part).clone().reshape(() if share is None else -1)
        per_row = math.prod(shape[1:])
        rows = range(shape[0]) if share is None else range(share.start // per_row, -(-share.stop // per_row))
        if not {spec.split_dim, stored.split_dim} - {0, None}:
            found = self._rows(stored, spec, tp_rank, tp_size, part, rows)
        else:
            found = self._columns(stored, spec, tp_rank, tp_size, part, rows)
        if share is None:
            return found.clone()
        return found.reshape(-1)[share.start - rows.start * per_row :][: len(share)]

    def _rows(
        self,
        stored: ParamSpec,
        spec: ParamSpec,
        tp_rank: int,
        tp_size: int,
        part: Callable[[int], Tensor],
        rows: range,
    ) -> Tensor:
        """Some rows of a local part whose cut is along rows. In the files they are in another order, and those of
        padding, which GPT-NeoX's files have values for, are zero here."""
        one_number = {"shape": spec.shape[:1], "kind": "vector"}
        numbers = torch.arange(1, spec.shape[0] + 1)  # of the rows of the whole; 0: padding
        wanted = shard(numbers, replace(spec, **one_number), tp_rank, tp_size)[rows.start : rows.stop]
        found: Tensor | None = None
        for rank in range(self.tp_size if stored.split_dim is not None else 1):
            there = shard(numbers, replace(stored, **one_number), rank, self.tp_size)
            there = to_disk(there, stored, self.heads, rank, self.tp_size)
            place = torch.full((spec.shape[0] + 1,), -1)
            place[there] = torch.arange(len(there))
            place[0] = -1
            source = place[wanted]
            (mine,) = torch.nonzero(source >= 0, as_tuple=True)
            if not len(mine):
                continue
            values, start = self._checked_part(stored, part, rank), int(source[mine[0]])
            if len(mine) == len(rows) and torch.equal(source, torch.arange(start, start + len(rows))):
                return values[start : start + len(rows)]
            if found is None:
                found = values.new_zeros(len(rows), *values.shape[1:])
            found[mine] = values[source[mine]]
        if found is None:  # nothing but padding
            values = self._checked_part(stored, part, 0)
            return values.new_zeros(len(rows), *values.shape[1:])
        return found

    def _columns(
        self,
        stored: ParamSpec,
        spec: ParamSpec,
        tp_rank: int,
        tp_size: int,
        part: Callable[[int], Tensor],
        rows: range,
    ) -> Tensor:
        """Some rows of a local part whose cut is not along rows."""
        if {spec.split_dim, stored.split_dim} >= {0}:
            return shard(self._full(stored.name, part), spec, tp_rank, tp_size)[rows.start : rows.stop]
        cut = [(s.split_dim, s.blocks, s.padded) for s in (spec, stored)]
        if cut[0] == cut[1] and tp_size == self.tp_size:
            return self._checked_part(stored, part, tp_rank)[rows.start : rows.stop]
        ranks = range(self.tp_size) if stored.split_dim is not None else range(1)
        parts = [self._checked_part(stored, part, rank)[rows.start : rows.stop] for rank in ranks]
        some = (len(rows), *spec.shape[1:])
        return shard(unshard(parts, replace(stored, shape=some)), replace(spec, shape=some), tp_rank, tp_size)

    def _checked_part(self, spec: ParamSpec, part: Callable[[int], Tensor], rank: int) -> Tensor:
        """What is stored of one tensor-parallel rank."""
        stored, expected = part(rank), spec.local_shape(self.tp_size)
        if tuple(stored.shape) != expected:
            raise UserError(
                f"{self.folder}: {spec.name} of tensor-parallel rank {rank} has shape {list(stored.shape)}, "
                f"expected {list(expected)}"
            )
        return stored

    def _shaped_like_parameter(self, name: str, tensor: Tensor) -> bool:
        return tuple(tensor.shape) == self.spec(name).local_shape(self.tp_size)

    def _weights(self, name: str, tp_rank: int) -> Tensor:
        if self._averaged and EMA in (kept := self._moments(name, tp_rank)):
            return kept[EMA]
        layer, local = layout.split_name(name)
        return self._entry(layout.weights_file(layer, tp_rank), stored_name(local, self.manifest.names))

    def _moments(self, name: str, tp_rank: int) -> dict[str, Tensor]:
        layer, _ = layout.split_name(name)
        return self._entry(layout.optimizer_file(layer, tp_rank), name)

    def _entry(self, file: str, key: str) -> Any:
        if file in self._files:
            self._files.move_to_end(file)
        else:
            self._files[file] = self.load_file(file)
            # Those of one layer, weights and optimizer, stay open: the pages of a mapped file count as our memory.
            if len(self._files) > 2 * self.tp_size:
                self._files.popitem(last=False)
        if key not in self._files[file]:
            raise UserError(f"{self.folder / file} has no entry {key}")
        return self._files[file][key]
