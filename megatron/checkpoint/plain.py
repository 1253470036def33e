"""The plain values of a state file (counters, what callbacks left), read without importing torch.

A file of `torch.save` is a zip archive with one pickle, with the structure, and the numbers of the tensors in
files of their own. Only the pickle is read; a tensor comes back as a `StandIn`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.errors import UserError


class StandIn:
    """In the place of a value of a type that is not read. Takes whatever a pickle does to it.

    Attributes:
        state: the plain values that an object had, by name.
    """

    state: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *_: object, **__: object) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...
    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.state = state

    def __setitem__(self, _: object, __: object) -> None: ...
    def __call__(self, *_: object, **__: object) -> StandIn:
        return self

    def append(self, _: object) -> None: ...
    def extend(self, _: object) -> None: ...
    def add(self, _: object) -> None: ...

    def __repr__(self) -> str:
        return "a value that is not read"


class _Reader(pickle.Unpickler):
    """Makes nothing but plain values: no name in a file makes it import or call anything.

    `foreign`: a stand-in also for what is not torch's; else that is an error.
    """

    def __init__(self, file: io.BytesIO, foreign: bool) -> None:
        super().__init__(file)
        self._foreign = foreign

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if self._foreign or module.split(".")[0] == "torch":
            return StandIn
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")

    def persistent_load(self, _: object) -> StandIn:
        return StandIn()


def read_plain(path: str | Path, foreign: bool = False) -> dict[str, Any]:
    """The content of a state file; `foreign`: of GPT-NeoX. Raises `UserError` when it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = _Reader(io.BytesIO(archive.read(name)), foreign).load()
    except Exception as error:  # nonsense makes zipfile and pickle raise nearly anything
        reason = f"{type(error).__name__}: {error}" if str(error) else "it is no file of torch.save"
        raise UserError(f"{path} cannot be read: {reason}. The checkpoint is damaged.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it does not hold a mapping. The checkpoint is damaged.")
    return content
