"""torch-format files written one tensor at a time, in one forward pass, with their CRC-32.

`torch.save` wants everything in memory at once; here a process holds one parameter at a time. A torch file is a zip
archive: `data/<i>` records hold the raw storages and `data.pkl` the structure that refers to them. The order of
the records is free, so the structure can come last. `torch.load` reads the result as any other (also with
`weights_only=True` and `mmap=True`), and so do GPT-NeoX and DeepSpeed.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.stored_zip import CheckedFile, StoredZip

_ALIGNMENT = 64  # of each storage inside the file, as torch writes them: what makes mmap reads fast
_CHUNK = 1 << 24
_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


class _Storage:
    """Stands for a storage in the pickle."""

    def __init__(self, key: int, dtype: torch.dtype, numel: int) -> None:
        self.key, self.dtype, self.numel = key, dtype, numel


class _Stored:
    """Stands for a written tensor in the pickle: rebuilt by the function that torch's own files name."""

    def __init__(self, storage: _Storage, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.storage, self.shape, self.stride = storage, shape, stride

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.storage, 0, tuple(self.shape), self.stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, _Storage):
            return ("storage", _STORAGES[value.dtype], str(value.key), "cpu", value.numel)
        return None


class TensorFileWriter:
    """Writes `{name: tensor}` or `{name: {key: tensor}}` as a torch file, one tensor at a time.

    Use as a context manager; leaving it without an exception completes the file. Afterwards `bytes` and `crc32`
    describe it. Writing raises `OSError` as any file does.
    """

    def __init__(self, path: Path) -> None:
        self._file = CheckedFile(path)
        self._zip = StoredZip(self._file)
        self._root = path.stem
        self._content: dict[str, Any] = {}
        self._tensors = 0

    def add(self, name: str, tensor: Tensor, key: str | None = None) -> None:
        """Write a tensor as entry `name` (or as entry `key` of the dict `name`)."""
        tensor = tensor.detach().contiguous().cpu()
        stored = self._write(tensor)
        if key is None:
            self._content[name] = stored
        else:
            self._content.setdefault(name, {})[key] = stored

    @property
    def bytes(self) -> int:
        return self._file.bytes

    @property
    def crc32(self) -> int:
        return self._file.crc32

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
                self._file.close()
        finally:
            self._file.abandon()

    def _write(self, tensor: Tensor) -> _Stored:
        key, self._tensors = self._tensors, self._tensors + 1
        raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
        pieces = (raw[start : start + _CHUNK] for start in range(0, len(raw), _CHUNK))
        self._zip.record(f"{self._root}/data/{key}", pieces, align=_ALIGNMENT)
        return _Stored(_Storage(key, tensor.dtype, tensor.numel()), tensor.shape, tensor.stride())

    def _finish(self) -> None:
        pickled = io.BytesIO()
        _Pickler(pickled, protocol=2).dump(self._content)
        for name, data in (
            ("data.pkl", pickled.getvalue()),
            ("byteorder", sys.byteorder.encode()),
            ("version", b"3\n"),
        ):
            self._zip.record(f"{self._root}/{name}", (data,))
        self._zip.finish()


def object_bytes(value: Any) -> bytes:
    """What `torch.save` writes of something small."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_bytes(path: Path, data: bytes) -> CheckedFile:
    """Write a small file; returns the closed file with its `bytes` and `crc32`."""
    file = CheckedFile(path)
    try:
        file.write(data)
    finally:
        file.close()
    return file


def sync(path: Path) -> None:
    """Make a file or folder durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
