"""Which code runs Mamba's convolution and scans: plain torch, or the fused kernels of causal-conv1d and mamba-ssm.

Legend: b batch, s sequence, c channels, n state per channel, n_h heads of p channels, g groups.

The kernels need a GPU. They are imported where they are chosen: wanted and missing there is an error that names the
requirements file; on a CPU plain torch, which computes the same, takes their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError
from megatron.home import installs
from megatron.layers.mamba_conv import causal_conv
from megatron.layers.mamba_scan import selective_scan
from megatron.layers.mamba_ssd import chunked_scan

# (x [b, s, c], weight [c, 1, k], bias, document numbers [b, s], earlier tokens [b, k-1, c]) -> silu(conv) [b, s, c]
Conv = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
# (x, raw step sizes, their bias, a, b, c, starts of documents, state) -> (y, last state), as in mamba_scan / mamba_ssd
Scan = Callable[..., tuple[Tensor, Tensor]]

_TORCH_CHUNK = 64  # tokens per chunk of Mamba-2 in plain torch, measured on CPUs


@dataclass(frozen=True)
class Kernels:
    """What one layer uses. `names`: for the log; `inner`: the kernel of everything behind in_proj, or None."""

    conv: Conv
    scan: Scan
    names: str
    inner: Callable[..., Tensor] | None = None


def choose_kernels(
    kind: str, device: torch.device, *, conv: bool | None, scan: bool | None, inner: bool, documents: bool, chunk: int
) -> Kernels:
    """For layers of `kind` mamba or mamba2.

    `conv`, `scan`, `inner`: the keys mamba_causal_conv_fusion, mamba_selective_scan_fusion, mamba_inner_func_fusion.
    `documents`: whether packed documents are kept apart, which Mamba-1's fused kernels cannot do.

    Raises `UserError` when a kernel is asked for on a GPU and not installed.
    """
    note = " (the fused kernels need a GPU)" if (conv or scan or inner) and device.type != "cuda" else ""
    fused_conv = _load("causal_conv1d", "causal_conv1d_fn", "mamba_causal_conv_fusion", conv, device)
    if kind == "mamba2":
        module, name = "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
        fused = _load(module, name, "mamba_selective_scan_fusion", scan, device)
        chosen = _torch_chunked(min(chunk, _TORCH_CHUNK)) if fused is None else _fused_chunked(fused, chunk)
        return Kernels(_conv(fused_conv), chosen, _names(fused_conv, fused) + note)
    module = "mamba_ssm.ops.selective_scan_interface"
    if documents:
        return Kernels(_conv(fused_conv), _torch_selective, _names(fused_conv, None) + note)
    whole = _load(module, "mamba_inner_fn", "mamba_inner_func_fusion", inner, device)
    fused = _load(module, "selective_scan_fn", "mamba_selective_scan_fusion", scan, device)
    chosen = _torch_selective if fused is None else _fused_selective(fused)
    names = "mamba_inner_fn" if whole is not None else _names(fused_conv, fused) + note
    return Kernels(_conv(fused_conv), chosen, names, whole)


def _load(module: str, name: str, key: str, wanted: bool | None, device: torch.device) -> Any:
    if wanted is False or device.type != "cuda":
        return None
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        if wanted:
            raise UserError(f"{key}: true needs {module.split('.')[0]} ({error}): {installs('mamba')}") from error
        return None


def _names(conv: Any, scan: Any) -> str:
    return (
        f"convolution {'torch' if conv is None else 'causal-conv1d'}, scan {'torch' if scan is None else 'mamba-ssm'}"
    )


def _conv(fused: Any) -> Conv:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None, tail: Tensor | None) -> Tensor:
        if fused is None or tail is not None:
            return F.silu(causal_conv(x, weight, bias, ids=ids, tail=tail))
        numbers = None if ids is None else ids.int().contiguous()
        y = fused(x.transpose(1, 2), weight.squeeze(1), bias, seq_idx=numbers, activation="silu")
        return y.transpose(1, 2)

    return run


def _torch_selective(
    x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    return selective_scan(x, steps(dt, bias), a, b, c, starts=starts, state=state)


def steps(dt: Tensor, bias: Tensor) -> Tensor:
    """Step sizes softplus(dt + bias), in fp32 at least."""
    return F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) + bias)


def _fused_selective(fused: Any) -> Scan:
    def run(
        x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor]:
        if starts is not None or state is not None:
            return _torch_selective(x, dt, bias, a, b, c, starts, state)
        turned = [part.transpose(1, 2).contiguous() for part in (x, dt, b, c)]
        x_, dt_, b_, c_ = turned
        y, last = fused(x_, dt_, a, b_, c_, delta_bias=bias.float(), delta_softplus=True, return_last_state=True)
        return y.transpose(1, 2), last.float().transpose(1, 2)

    return run


def _torch_chunked(chunk: int) -> Scan:
    def run(
        x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor]:
        return chunked_scan(x, steps(dt, bias), a, b, c, chunk=chunk, starts=starts, state=state)

    return run


def _fused_chunked(fused: Any, chunk: int) -> Scan:
    def run(
        x: Tensor, dt: Tensor, bias: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor]:
        numbers = None if starts is None else starts.int().cumsum(1, dtype=torch.int32)
        return fused(
            x, dt, a, b, c, chunk, dt_bias=bias.float(), dt_softplus=True, initial_states=state, seq_idx=numbers,
            return_final_states=True,
        )  # fmt: skip

    return run
