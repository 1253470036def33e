"""Is a checkpoint as it was written? All ranks read a part of its files and compare checksums."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from megatron.checkpoint.agreement import gather, together
from megatron.checkpoint.find import Checkpoint
from megatron.log import ProgressBar
from megatron.mpu.state import ParallelState

_TENSORS = re.compile(r"^(optim_)?layer_(\d+)-model_(\d+)")


def find_damage(checkpoint: Checkpoint, state: ParallelState, *, load_optim: bool = True) -> str | None:
    """What is wrong with the first damaged file, in words; None when all are as they were written. Collective.

    Every file is read by one rank: at the checkpoint's layout by one that loads it or a neighbouring layer, so that on
    a shared file system its pages are in the memory of the machine that needs them. Others' files have no checksum.
    """
    if checkpoint.foreign:
        return None
    problem, manifest = None, checkpoint.manifest
    mine = _share(checkpoint, state, load_optim)
    size = sum(manifest.files[name].bytes for name in mine)
    what = f"checking {checkpoint.path.name}"
    with together(what, state), ProgressBar(what, size, "B") as report:
        for name in mine:
            if problem := manifest.wrong_file(checkpoint.path, name):
                break
            report(manifest.files[name].bytes)
    return next((found for found in gather(problem, state) if found), None)


def _share(checkpoint: Checkpoint, state: ParallelState, load_optim: bool) -> list[str]:
    """The files that this rank reads."""
    tensors: list[tuple[int, str]] = []
    mine, cut_alike = [], checkpoint.manifest.layout["tp"] == state.tp_size
    for number, name in enumerate(sorted(checkpoint.manifest.files)):
        match = _TENSORS.match(name)
        if match is None:
            mine += [name] if number % state.topology.world_size == state.rank else []
        elif (load_optim or not match[1]) and (not cut_alike or int(match[3]) == state.tp_rank):
            tensors.append((int(match[2]), name))
    names = [name for _, name in sorted(tensors)]  # by layer
    if cut_alike:
        rank, ranks = state.pp_rank * state.dp_size + state.dp_rank, state.pp_size * state.dp_size
    else:
        rank, ranks = state.rank, state.topology.world_size
    return mine + _cut([checkpoint.manifest.files[name].bytes for name in names], names, rank, ranks)


def _cut(sizes: Sequence[int], names: Sequence[str], rank: int, ranks: int) -> list[str]:
    """The names whose middle byte is in part `rank` of `ranks` equal parts of all bytes."""
    total = max(1, sum(sizes))
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [
        name for name, middle in zip(names, middles, strict=True) if min(int(middle * ranks / total), ranks - 1) == rank
    ]
