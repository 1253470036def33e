"""`deterministic`: what makes a repeated run have the same bits, on a GPU too. Reads and sets the environment."""

from __future__ import annotations

import os

import torch
import torch.utils.deterministic

from megatron.errors import UserError
from megatron.log import get_logger

logger = get_logger(__name__)

# What cuBLAS takes for its workspace where products are to be repeatable, by NVIDIA's documentation.
CUBLAS, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
# NVLink's switches add up in the order in which pieces arrive; Transformer Engine leaves out such kernels.
OTHERS = {"NCCL_NVLS_ENABLE": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def make_deterministic() -> None:
    """Have torch, cuBLAS, cuDNN, NCCL and Transformer Engine add up in the same order each time. Before the first
    product on a GPU and before NCCL starts.

    An operation of torch that cannot be repeated then raises an error that names it; flash-attn is asked for its
    repeatable backward pass (layers/attention_kernels), torch.compile does not choose kernels by their speed.

    Raises:
        UserError: the environment sets a variable otherwise.
    """
    wanted = {CUBLAS: WORKSPACES, **{name: (value,) for name, value in OTHERS.items()}}
    from torch._inductor import config as inductor  # takes long to import

    for name, values in wanted.items():
        if os.environ.setdefault(name, values[0]) not in values:
            raise UserError(
                f"deterministic: {name}={os.environ[name]} in the environment; unset it, or set it to "
                f"{' or '.join(values)}"
            )
    torch.use_deterministic_algorithms(True)
    # What nobody has written is not filled: nothing reads it, and it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    inductor.deterministic = True
    switched = ", ".join(f"{name}={os.environ[name]}" for name in wanted)
    logger.info(f"deterministic: torch's repeatable algorithms, no timing of kernels, {switched}")
