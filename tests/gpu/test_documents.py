"""Intra-document masking through the whole network on a GPU (known-faults 3), eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.sequential import SequentialModel
from megatron.mpu.state import ParallelState
from megatron.training.compile import compile_blocks
from tests.model.networks import VOCAB, build, logits, tiny

pytestmark = pytest.mark.gpu

LENGTH, SPLIT = 128, 50  # document A is columns 0..49, B the rest
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "intra_document_masking": True,
    "init_method_std": 0.1,
}
FORMS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"pos_emb": "learned"},
    "window": {"sliding_window_width": 20},
    "alibi": {"pos_emb": "alibi"},
}


def network(dtype: torch.dtype, **changes: Any) -> SequentialModel:
    if changes.get("attention_backend") == "flash":
        pytest.importorskip("flash_attn")
    return build(tiny(**{**WIDE, **changes}), ParallelState.single("cuda")).to(dtype)


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """tokens, positions that restart at SPLIT, document numbers."""
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    columns = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    ids = (columns >= SPLIT).long()
    return tokens, columns - SPLIT * ids, ids


BACKENDS = ("torch", "cudnn", "varlen", "flex", "flash", "auto")
# varlen refuses ALiBi (test_attention).
PAIRS = [(backend, form) for backend in BACKENDS for form in FORMS if (backend, form) != ("varlen", "alibi")]


@pytest.mark.parametrize(("backend", "form"), PAIRS)
@torch.no_grad()
def test_another_document_changes_nothing(backend: str, form: str) -> None:
    model = network(torch.bfloat16, attention_backend=backend, **FORMS[form])
    tokens, positions, ids = packed()
    other = tokens.clone()
    other[:, :SPLIT] = (other[:, :SPLIT] + 1) % VOCAB
    before, after = (logits(model, x, positions, ids) for x in (tokens, other))
    assert torch.equal(before[:, SPLIT:], after[:, SPLIT:])
    assert not torch.equal(before[:, :SPLIT], after[:, :SPLIT])


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_alone_gives_the_same_in_fp32(form: str) -> None:
    model = network(torch.float32, **FORMS[form])
    tokens, positions, ids = packed()
    together = logits(model, tokens, positions, ids)[:, SPLIT:]
    alone = logits(model, tokens[:, SPLIT:], positions[:, SPLIT:], ids[:, SPLIT:])
    assert (together - alone).abs().max() < 2e-6 * together.abs().max().clamp(min=1)


@pytest.mark.parametrize("backend", ["torch", "varlen"])
def test_compiled_blocks_compute_the_same(backend: str) -> None:
    """Also with another number of documents in the second step, and without a second graph for it."""
    tokens, positions, ids = packed()
    targets = tokens.roll(-1, 1)
    gradients, graphs = [], []
    for compiled in (False, True):
        model = network(torch.bfloat16, attention_backend=backend)
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            compile_blocks(model)
        for numbers in (ids, positions // 7 + 20 * ids):
            labels = (targets, torch.ones(targets.shape, device="cuda"), torch.tensor([1e-2], device="cuda"))
            model((tokens, positions, numbers), labels)[0].backward()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        gradients.append([p.grad.float() for p in model.parameters()])
    assert graphs[2:] == [3, 3]  # the block; the sums and the gradient of the loss
    for eager, traced in zip(*gradients, strict=True):
        assert (eager - traced).abs().max() < 3e-2 * eager.abs().max()
