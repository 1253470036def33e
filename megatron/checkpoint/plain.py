"""The plain values of a state file (counters, what callbacks left), read without importing torch.

A file of `torch.save` is a zip archive with one pickle, with the structure, and the numbers of the tensors in
files of their own. Only the pickle is read; a tensor comes back as `LEFT_OUT`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from megatron.errors import UserError


class _LeftOut:
    """Stands for everything of torch's: types of storages, functions that make tensors, and what they would return."""

    def __call__(self, *_: object, **__: object) -> _LeftOut:
        return self

    def __setstate__(self, _: object) -> None: ...

    def __repr__(self) -> str:
        return "a tensor, not read"


LEFT_OUT = _LeftOut()


class _Reader(pickle.Unpickler):
    """Makes nothing but plain values: no name in a file makes it import or call anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module.split(".")[0] == "torch":
            return LEFT_OUT
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")

    def persistent_load(self, _: object) -> _LeftOut:
        return LEFT_OUT


def read_plain(path: str | Path) -> dict[str, Any]:
    """The content of a state file. Raises `UserError` when it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = _Reader(io.BytesIO(archive.read(name))).load()
    except Exception as error:  # nonsense makes zipfile and pickle raise nearly anything
        reason = f"{type(error).__name__}: {error}" if str(error) else "it is no file of torch.save"
        raise UserError(f"{path} cannot be read: {reason}. The checkpoint is damaged.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it does not hold a mapping. The checkpoint is damaged.")
    return content
