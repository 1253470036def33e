"""Torch files that others wrote, read without running anything that is in them.

GPT-NeoX's files hold more than tensors: states of NumPy's generator, settings of DeepSpeed. `weights_only` refuses
those files as a whole. They are read again by an unpickler that makes tensors and plain values, and replaces
everything else by a stand-in: no name in a file makes it import or call anything beyond the table here.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.checkpoint.plain import StandIn
from megatron.errors import UserError
from megatron.files import refuse_lfs_pointer

_TENSOR_MAKERS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
}
_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TYPES:
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return super().find_class(module, name)
        return _TENSOR_MAKERS.get((module, name), StandIn)


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


_TENSORS_ALONE = SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="tensors alone")


def load_foreign(path: Path) -> dict[str, Any]:
    """The content of a torch file, mapped into memory. Raises `UserError` when it is damaged or no such file."""
    refuse_lfs_pointer(path)
    mapped = zipfile.is_zipfile(path)  # torch before 1.6 wrote another format, which cannot be mapped
    try:
        try:
            content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except pickle.UnpicklingError:
            content = torch.load(
                path, map_location="cpu", mmap=mapped, weights_only=False, pickle_module=_TENSORS_ALONE
            )
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path} cannot be read: {reason}. It is damaged, or not a file of torch.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not the parameters of a model")
    return content
