"""Kernels on a CPU in the place of cuBLAS's products with fp32 results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from megatron.mpu import product_sums
from megatron.training import partition_comm

Shapes = list[tuple[int, ...]]


@contextlib.contextmanager
def summing() -> Iterator[Shapes]:
    """Inside, products of half-precision factors add to fp32 sums: exactly, rounded once. Gives their shapes
    [n, k] · [k, m] as (n, k, m); those that begin a sum end with a 0."""
    calls: Shapes = []

    def check(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor) -> None:
        assert dtype == out.dtype == torch.float32 and a.dtype == b.dtype != dtype and out.is_contiguous()

    def add(total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        check(a, b, dtype, out)
        assert out.data_ptr() == total.data_ptr()
        calls.append((*a.shape, b.shape[1]))
        return out.copy_(total.double() + a.double() @ b.double())

    def begin(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
        check(a, b, dtype, out)
        calls.append((*a.shape, b.shape[1], 0))
        return out.copy_(a.double() @ b.double())

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", add, "CPU")
    library.impl("mm.dtype_out", begin, "CPU")
    try:
        with (
            mock.patch.object(product_sums, "sums_products", lambda device: True),
            mock.patch.object(partition_comm, "sums_products", lambda device: True),
        ):
            yield calls
    finally:
        library._destroy()
