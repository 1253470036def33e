"""What each data rank has of the parameters (`Engine.share`), and its way to the one rank that writes a file.

One rank writes a file, all data ranks write at the same time: files are dealt out by size, and among ranks that have
room by what a rank has already, since ZeRO's partitions are contiguous. (Ranges of many ranks in one file would meet at
its locks on Lustre, and the row order on disk is not that in memory.) What a writer lacks comes from the ranks that
have it, a parameter at a time, in the host's memory over `state.host`: no device needs room for it, and nothing is
added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.agreement import gather
from megatron.mpu.state import ParallelState
from megatron.optim.ema import EVALUATED

_KEYS = 32  # more than any optimizer keeps for a parameter


class SharingEngine(Protocol):
    """What is asked of the engine (`training.engine.Engine`)."""

    def share(self, name: str) -> range: ...
    def read_share(self, name: str) -> dict[str, Tensor]: ...
    def beat(self) -> None: ...


@dataclass(frozen=True)
class File:
    """A file to be written: parameters of one layer, in order, and which values of them.

    `dtypes`: the type of a weight by name, in a file of weights; None in one of all optimizer state, in fp32.
    """

    name: str
    parameters: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype] | None = None


class Pieces:
    """The shares of the data ranks that hold the same tensor-parallel part of the same stage. Collective.

    Args:
        names: of the parameters, the same on these ranks, in the same order.
    """

    def __init__(self, engine: SharingEngine, names: Sequence[str], state: ParallelState) -> None:
        self.state, self.beat = state, engine.beat
        self._index = {name: index for index, name in enumerate(names)}
        self._mine = {name: engine.read_share(name) for name in names}
        shares = [engine.share(name) for name in names]
        everybody = gather(np.array([(s.start, s.stop) for s in shares], np.int64).reshape(-1, 2), state)
        place = state.topology.coord(state.rank)
        self._ranks = [state.topology.rank(**{**place, "data": data}) for data in range(state.dp_size)]
        self._bounds = np.stack([everybody[rank] for rank in self._ranks])  # [data ranks, names, 2]

    def not_finite(self, dtypes: Mapping[str, torch.dtype]) -> list[str]:
        """The parameters of which this rank's share is not finite in the type that is written."""
        shares = {name: share[_written(share)] for name, share in self._mine.items()}
        return [name for name, weight in shares.items() if not weight.to(dtypes[name]).isfinite().all()]

    def size(self, file: File) -> int:
        """About how many bytes the file will have."""
        return int(self._held(file).sum())

    def deal(self, files: Sequence[File]) -> list[list[File]]:
        """Who writes what: the files of each data rank, the largest first. The same on all of them."""
        return deal(files, [self._held(file) for file in files]) if files else [[] for _ in self._ranks]

    def move(self, turn: Sequence[File | None]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(name, whole values: flat, in the host's memory) of each parameter of the file that this rank writes in this
        turn, one at a time. `turn`: the file of every data rank (None: it writes none). All ranks must use it up."""
        sent = [
            (dist.isend(piece, self._ranks[writer], group=self.state.host, tag=tag), piece)
            for writer, file in enumerate(turn)
            if file is not None and writer != self.state.dp_rank
            for name in file.parameters
            for tag, piece in self._pieces_to_send(file, name)
        ]
        if (file := turn[self.state.dp_rank]) is not None:
            coming = self._receive(file, file.parameters[0])
            for name, following in zip(file.parameters, (*file.parameters[1:], None), strict=True):
                (values, works), coming = coming, self._receive(file, following)  # while this one is written
                while works:  # what is done holds on to its tensors
                    works.pop().wait()
                self.beat()
                yield name, values
                values.clear()  # before the next but one is received
        for work, _ in sent:
            work.wait()
        self.beat()

    def _pieces_to_send(self, file: File, name: str) -> Iterator[tuple[int, Tensor]]:
        for tag, key, dtype in self._keys(file, name):
            value = self._mine[name][key]
            if value.ndim == 1 and value.numel():
                yield tag, value.to("cpu", dtype)

    def _receive(self, file: File, name: str | None) -> tuple[dict[str, Tensor], list[dist.Work]]:
        """Where the values of a parameter will be when the works are done."""
        values: dict[str, Tensor] = {}
        works = []
        if name is None:
            return values, works
        bounds = self._bounds[:, self._index[name]]
        for tag, key, dtype in self._keys(file, name):
            mine = self._mine[name][key]
            if mine.ndim != 1 or mine.numel() == bounds[:, 1].max():
                values[key] = mine.to("cpu", dtype)
                continue
            values[key] = whole = torch.empty(int(bounds[:, 1].max()), dtype=dtype)
            for rank, (start, stop) in enumerate(bounds.tolist()):
                if rank == self.state.dp_rank:
                    whole[start:stop] = mine
                elif start < stop:
                    source = self._ranks[rank]
                    work = dist.irecv(whole[start:stop], source, group=self.state.host, tag=tag)
                    works.append(work)
        return values, works

    def _keys(self, file: File, name: str) -> Iterator[tuple[int, str, torch.dtype]]:
        """(tag of its message, key, type) of the values of a parameter in a file."""
        weights, mine = file.dtypes is not None, self._mine[name]
        for number, key in enumerate(mine):
            if key == _written(mine) if weights else key != EVALUATED:
                tag = 2 * (_KEYS * self._index[name] + number) + weights
                yield tag, key, file.dtypes[name] if file.dtypes is not None else torch.float32

    def _held(self, file: File) -> np.ndarray:
        """Bytes of the file that each data rank has."""
        held = np.zeros(len(self._ranks), np.int64)
        for name in file.parameters:
            bounds = self._bounds[:, self._index[name]]
            held += (bounds[:, 1] - bounds[:, 0]) * sum(dtype.itemsize for _, _, dtype in self._keys(file, name))
        return held


def _written(share: Mapping[str, Tensor]) -> str:
    """The key of what a file of weights holds."""
    return EVALUATED if EVALUATED in share else next(iter(share))


def deal(files: Sequence[File], held: Sequence[np.ndarray]) -> list[list[File]]:
    """The files of each rank, the largest first, so that no rank has much more to write than another; among those that
    have room, the one that has most of a file gets it. `held`: bytes of each file that each rank has."""
    sizes = [int(parts.sum()) for parts in held]
    order = sorted(range(len(files)), key=lambda i: -sizes[i])
    room = np.zeros(len(held[0]) if held else 1, np.int64)
    for i in order:  # the least loaded gets the next largest: at most a third above the best there is
        room[room.argmin()] += sizes[i]
    most, load = room.max(), np.zeros_like(room)
    dealt: list[list[File]] = [[] for _ in load]
    for i in order:
        fits = np.flatnonzero(load + sizes[i] <= most)
        fits = fits[held[i][fits] == held[i][fits].max()] if len(fits) else np.arange(len(load))
        rank = int(fits[load[fits].argmin()])
        load[rank] += sizes[i]
        dealt[rank].append(files[i])
    return dealt
