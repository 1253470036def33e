"""The part of a corpus that one machine of several tokenises.

The sizes of the input files on disk, one after the other, are cut into `n` equal ranges; shard `i` has the records that
start in range `i`. So a shard is a contiguous part of the input, and shards joined in order equal what one machine
makes of the whole. Files that cannot be cut (compressed ones, text documents, `.json` lists) belong to the shard in
whose range they start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.tokenise.formats import Part, splittable
from megatron.errors import UserError
from megatron.mpu.topology import ranks_from_environment

# Some launchers set no local rank. It does not matter here.
_LOCAL_RANKS = {
    "RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_PROCID": "SLURM_LOCALID",
}


@dataclass(frozen=True)
class Shard:
    """Shard `index` (from 0) of `count`."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """The part of its datasets' names after the output prefix."""
        return f"_shard_{self.index:05d}_of_{self.count:05d}"

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def parts(self, paths: Sequence[Path]) -> list[Part]:
        """The parts of the files that this shard reads, in order. Raises `UserError` for a pipe, which has no size."""
        for path in paths:
            if not path.is_file():
                raise UserError(f"{path}: only regular files can be divided into shards")
        return list(self._parts([(path, path.stat().st_size) for path in paths]))

    def _parts(self, files: Sequence[tuple[Path, int]]) -> Iterator[Part]:
        total, at = sum(size for _, size in files), 0
        low = total * self.index // self.count
        high = total * (self.index + 1) // self.count if self.index + 1 < self.count else total + 1
        for path, size in files:
            if splittable(path):
                if low < at + size and at < high:
                    yield Part(path, max(low - at, 0), None if high >= at + size else high - at)
            elif low <= at < high:
                yield Part(path)
            at += size


def parse_shard(text: str, env: Mapping[str, str]) -> Shard:
    """The shard that `--shard` names: `i/n` with `i` counted from 0, or `auto` for this process's rank in `env`.

    Raises `UserError` for anything else, and for `auto` without a launcher's variables.
    """
    if text == "auto":
        return _from_environment(env)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise UserError(f"--shard {text}: give i/n, such as 0/16 for the first of 16, or auto")
    index, count = int(match[1]), int(match[2])
    if index >= count:
        last = f", so the last of {count} is {count - 1}/{count}" if count else " and there must be at least one"
        raise UserError(f"--shard {text}: shards are counted from 0{last}")
    return Shard(index, count)


def _from_environment(env: Mapping[str, str]) -> Shard:
    known = [rank for rank in (*_LOCAL_RANKS, "PMI_RANK") if rank in env]
    if not known:
        raise UserError(
            "--shard auto: none of RANK (with WORLD_SIZE), SLURM_PROCID, OMPI_COMM_WORLD_RANK, MV2_COMM_WORLD_RANK, "
            "PMI_RANK is set: start the command with srun or mpirun, or give --shard i/n"
        )
    if known == ["PMI_RANK"]:
        env = {"MPI_LOCALRANKID": "0", **env}
    ranks = ranks_from_environment({**{_LOCAL_RANKS[rank]: "0" for rank in known if rank in _LOCAL_RANKS}, **env})
    return Shard(ranks.rank, ranks.world_size)
