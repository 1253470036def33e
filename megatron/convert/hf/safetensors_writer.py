"""Writes a model as safetensors files one tensor at a time.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian length of the header, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the data without gaps. All shapes are known beforehand, so the header
comes first and nothing but the tensor at hand is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron.convert.precision import cast
from megatron.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Planned:
    """A tensor to come: name and shape."""

    name: str
    shape: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        return torch.Size(self.shape).numel() * dtype.itemsize


def shard_bytes(text: str) -> int:
    """`--max-shard-size` in bytes, units as in transformers: 500MB, 5GB. Raises `UserError`."""
    number, unit = text[:-2], _UNITS.get(text[-2:].upper())
    if unit is None or not number.replace(".", "", 1).isdecimal() or not float(number):
        raise UserError(f"--max-shard-size: {text!r} is no size; write it as 500MB or 5GB")
    return int(float(number) * unit)


def write_safetensors(
    folder: Path, plan: Sequence[Planned], tensors: Iterable[Tensor], dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """Write the planned tensors, which `tensors` yields in that order, into shards of at most `max_shard_bytes`.

    A tensor that is larger than a shard gets a shard of its own. More than one shard adds the index file. Raises
    `UserError` when a finite value does not fit `dtype`.
    """
    shards = _divide(plan, dtype, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    stream = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "wb") as file:
            _write_header(file, shard, dtype)
            for planned in shard:
                _write_tensor(file, planned, next(stream), dtype)
    if next(stream, None) is not None:
        raise ValueError("more tensors than planned")
    if len(shards) > 1:
        weight_map = {planned.name: name for name, shard in zip(names, shards, strict=True) for planned in shard}
        total = sum(planned.bytes(dtype) for planned in plan)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _divide(plan: Sequence[Planned], dtype: torch.dtype, limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    used = 0
    for planned in plan:
        if shards[-1] and used + planned.bytes(dtype) > limit:
            shards.append([])
            used = 0
        shards[-1].append(planned)
        used += planned.bytes(dtype)
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_header(file: BinaryIO, shard: Sequence[Planned], dtype: torch.dtype) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in shard:
        end = offset + planned.bytes(dtype)
        header[planned.name] = {"dtype": _DTYPES[dtype], "shape": list(planned.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)


def _write_tensor(file: BinaryIO, planned: Planned, tensor: Tensor, dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != planned.shape:
        raise ValueError(f"{planned.name} has shape {list(tensor.shape)}, planned {list(planned.shape)}")
    written = cast(tensor, dtype, planned.name).contiguous()
    file.write(memoryview(written.reshape(-1).view(torch.uint8).numpy()))
