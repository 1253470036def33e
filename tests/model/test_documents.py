"""Intra-document masking, through the whole network (known-faults 3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.networks import LLAMA, NEOX, VOCAB, batch, build, logits, tiny

pytestmark = pytest.mark.cpu

SPLIT = 7  # document A is columns 0..6, B the rest
FORMS: list[dict[str, Any]] = [
    LLAMA,
    NEOX,
    {"pos_emb": "learned"},
    {"pos_emb": "alibi"},
    {"sliding_window_width": 5},
    {"attention_backend": "manual"},
]


def _packed() -> tuple[Tensor, Tensor, Tensor]:
    """tokens, positions that restart at SPLIT, doc_ids."""
    tokens, positions, _ = batch()
    doc_ids = (positions >= SPLIT).long()
    return tokens, positions - SPLIT * doc_ids, doc_ids


@pytest.mark.parametrize("changes", FORMS, ids=str)
@torch.no_grad()
def test_another_document_changes_nothing_and_alone_gives_the_same(changes: dict[str, Any]) -> None:
    network = build(tiny(intra_document_masking=True, init_method_std=0.2, **changes))
    tokens, positions, doc_ids = _packed()
    packed = logits(network, tokens, positions, doc_ids)

    other = tokens.clone()
    other[:, :SPLIT] = (other[:, :SPLIT] + 1) % VOCAB
    changed = logits(network, other, positions, doc_ids)
    assert torch.equal(packed[:, SPLIT:], changed[:, SPLIT:])
    assert not torch.equal(packed[:, :SPLIT], changed[:, :SPLIT])

    alone = logits(network, tokens[:, SPLIT:], positions[:, SPLIT:], doc_ids[:, SPLIT:])
    assert (packed[:, SPLIT:] - alone).abs().max() < 1e-6 * packed.abs().max().clamp(min=1)


@torch.no_grad()
def test_without_masking_the_other_document_leaks() -> None:
    network = build(tiny(**LLAMA))
    tokens, positions, _ = _packed()
    other = tokens.clone()
    other[:, :SPLIT] = (other[:, :SPLIT] + 1) % VOCAB
    assert not torch.equal(logits(network, tokens, positions)[:, SPLIT:], logits(network, other, positions)[:, SPLIT:])


def test_gradients_do_not_cross_either() -> None:
    network = build(tiny(intra_document_masking=True, pos_emb="learned", no_weight_tying=True))
    tokens, positions, doc_ids = _packed()
    tokens = tokens % 30 + 30 * doc_ids  # A uses tokens 0..29, B 30..59
    _, _, targets = batch()
    labels = (targets, doc_ids.float(), torch.tensor(1.0))  # loss on B only
    network((tokens, positions, doc_ids), labels).backward()
    grad = network.sequential[0].word_embeddings.weight.grad
    assert grad[:30].abs().max() == 0
    assert grad[30:60].abs().max() > 0
