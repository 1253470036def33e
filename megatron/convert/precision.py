"""The types that weights are written in."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.errors import UserError

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_of(precision: str, stored: torch.dtype) -> torch.dtype:
    """The type that `--precision` names; `auto` is the stored one. Raises `UserError` listing the choices."""
    if precision not in ("auto", *PRECISIONS):
        raise UserError(f"--precision: {precision!r} is not known. Choices: auto, {', '.join(PRECISIONS)}")
    return PRECISIONS.get(precision, stored)


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another type. Raises `UserError` with its name when a finite value is beyond fp16's range."""
    converted = tensor.to(dtype)
    overflows = dtype == torch.float16 and tensor.dtype != dtype and not converted.isfinite().all()
    if overflows and tensor.isfinite().all():
        raise UserError(f"{name}: values beyond fp16's range; use --precision bf16 or fp32")
    return converted
