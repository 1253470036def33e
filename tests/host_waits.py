"""Where the host would wait for a GPU: counted on a CPU, by what is called.

A value that Python reads, and a result whose size depends on the data, make the host wait until the device has computed
everything before it. So does a copy of numbers that Python has.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARY = str(Path(__file__).resolve().parents[1] / "megatron")
_aten = torch.ops.aten
# Readers of a value, and operators that must know one to size their result.
_READERS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.bincount.default,
    _aten.equal.default,
}
_METHODS = {"tolist", "numpy"}  # these reach no operator where the tensor is on the CPU
_FROM_PYTHON = {torch.tensor, torch.as_tensor}


class HostWaits(TorchDispatchMode):
    """Inside, counts them: `found["file.py:function"]`, by the innermost frame of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._methods = _Methods(self)

    def __enter__(self) -> HostWaits:
        self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._methods.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in _READERS
            or _sized_by_mask(func, args)
            or func is _aten.repeat_interleave.Tensor
            and kwargs.get("output_size") is None
        ):
            self.count()
        return func(*args, **kwargs)

    def count(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and not frame.f_code.co_filename.startswith(_LIBRARY):
            frame = frame.f_back
        self.found[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1


def _sized_by_mask(func: Any, args: Any) -> bool:
    """`x[mask]`, and `x[mask] = y` unless y is one number."""
    if func is _aten.index_put_.default and args[2].numel() == 1:
        return False
    by_index = func in (_aten.index.Tensor, _aten.index_put_.default)
    return by_index and any(i is not None and i.dtype == torch.bool for i in args[1])


class _Methods(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copied = func in _FROM_PYTHON and kwargs.get("device") is not None
        if copied or getattr(func, "__name__", "") in _METHODS:
            self.waits.count()
        return func(*args, **kwargs)
