"""Between stages travel hidden states and their gradients; what each stage can read from its batch does not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.pipe import p2p

from tests.distributed import run_distributed
from tests.training.models import MODELS
from tests.training.tiny import Layout, build, step_batch

pytestmark = pytest.mark.cpu


def messages(rank: int, world: int, keys: dict[str, Any]) -> tuple[int, list[tuple[str, int]]]:
    """(micro-batches, type and dimensions of what this rank sends) of the second step."""
    engine, args, lr = build(rank, keys, Layout(pp=2, micro=1))
    engine.train_batch(step_batch(0, args, engine.state), lr(0))
    sent: list[tuple[str, int]] = []
    send = p2p.send

    def count(tensor: Any, *places: Any, **options: Any) -> Any:
        sent.append((str(tensor.dtype), tensor.dim()))
        return send(tensor, *places, **options)

    with mock.patch.object(p2p, "send", count):
        engine.train_batch(step_batch(1, args, engine.state), lr(1))
    return args.training.gradient_accumulation_steps, sent


def test_a_micro_batch_is_one_message_each_way() -> None:
    for micro_batches, sent in run_distributed(messages, 2, MODELS["documents"]):
        assert micro_batches > 1
        assert sent == [("torch.float32", 2)] * micro_batches
