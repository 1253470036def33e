"""Tensors in files: where each is, and reading them one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """Where a tensor is, and what it is. `start`: of its bytes in the file, where the format has such a place."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0


class Source(Protocol):
    """A folder of tensors, read one at a time."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, Stored]: ...
    def tensor(self, name: str) -> Tensor: ...
    def copy_tokenizer(self, target: Path) -> None: ...


class OneByOne(Sequence[Tensor]):
    """Tensors that are read when they are accessed, so that a transform of many need not hold them all."""

    def __init__(self, read: Callable[[str], Tensor], names: Sequence[str]) -> None:
        self._read, self._names = read, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return OneByOne(self._read, self._names[index])
        return self._read(self._names[index])
