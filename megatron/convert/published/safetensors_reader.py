"""Reads safetensors files a tensor at a time, straight from the mapped file (the format: safetensors_writer.py).

The library keeps a whole file mapped, whose pages count as the process's memory; here only a tensor's own are, for as
long as the tensor is used.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.convert.parts.tensors import Stored
from megatron.errors import UserError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LONGEST_HEADER = 100_000_000  # bytes, the library's own limit


def read_header(path: Path, without: tuple[str, ...] = ()) -> dict[str, Stored]:
    """What a file holds, apart from names that end as one of `without`.

    Raises `UserError` when it is damaged, or holds other tensors than of floating point.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _LONGEST_HEADER:
                raise ValueError(f"its header would have {size} bytes")
            header = json.loads(file.read(size))
            length = file.seek(0, 2)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if length != 8 + size + end:
            raise ValueError(f"it has {length} bytes, its header describes {8 + size + end}")
        wanted = {name: entry for name, entry in header.items() if not name.endswith(without)}
        other = {entry["dtype"] for entry in wanted.values()} - _DTYPES.keys()
        found = {} if other else {name: _stored(path.name, entry, 8 + size) for name, entry in wanted.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if other:
        raise UserError(f"{path} holds {', '.join(sorted(other))} tensors; quantised models are not converted")
    return found


def _stored(file: str, entry: dict[str, Any], base: int) -> Stored:
    shape, dtype, (start, end) = tuple(entry["shape"]), _DTYPES[entry["dtype"]], entry["data_offsets"]
    if end - start != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for a tensor of {list(shape)}")
    return Stored(file, shape, dtype, base + start)


def read_tensor(path: Path, stored: Stored) -> Tensor:
    """A tensor whose memory is the file's pages; what is written into it stays in this process."""
    size = torch.Size(stored.shape).numel() * stored.dtype.itemsize
    if not size:
        return torch.empty(stored.shape, dtype=stored.dtype)
    before = stored.start % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=stored.start - before)
    pages.madvise(mmap.MADV_WILLNEED)  # read ahead from here on
    raw = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=before)
    aligned = raw if stored.start % stored.dtype.itemsize == 0 else raw.clone()
    return aligned.view(stored.dtype).view(stored.shape)
