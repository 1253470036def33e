"""Parameters that stay in fp32 in a half-precision model (`ParamSpec.keep_fp32`): Mamba's A_log and D.

DeepSpeed casts every parameter. Its optimizers take groups of any one type, so what is kept only needs a group of its
own (`optim/groups`) and to be left out of the cast. ZeRO-3 cuts all parameters alike, in one type: nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from deepspeed.runtime.engine import DeepSpeedEngine as Runtime
from torch.nn import Parameter

from megatron.mpu.sharding import spec_of


@contextmanager
def keep_in_fp32(params: Iterable[Parameter], stage: int) -> Iterator[None]:
    """While DeepSpeed's engine is built: those of `params` that are to be kept keep their type."""
    kept = [p for p in params if spec_of(p).keep_fp32] if stage < 3 else []
    if not kept:
        yield
        return
    cast = Runtime._cast_module_mixed_precision

    def cast_the_others(engine: Any, *args: Any, **kwargs: Any) -> None:
        values = [p.data for p in kept]
        cast(engine, *args, **kwargs)
        for p, value in zip(kept, values, strict=True):
            p.data = value

    with mock.patch.object(Runtime, "_cast_module_mixed_precision", cast_the_others):
        yield
