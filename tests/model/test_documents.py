"""Intra-document masking, through the whole network and every layout of it (known-faults 3).

A sample is packed with documents A, B, C and padding, which is a document of its own at the end. What other documents
hold must change a document's logits by exactly 0, and alone it must give what it gives in the sample.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.layers import attention_contract, documents
from megatron.layers.attention_masks import visible_mask
from megatron.layers.carry import Carry
from megatron.layers.documents import Documents
from megatron.model import sequential
from megatron.model.block import TransformerBlock
from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.objectives import OBJECTIVES
from tests.distributed import run_distributed
from tests.model.networks import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    NEOX,
    PHI,
    SEED,
    VOCAB,
    batch,
    build,
    logits,
    padded,
    randomise_vectors,
    tiny,
)

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]

LENGTH = 24
# By row, where each document ends; the last span is padding.
ENDS = ((7, 8, 19, 24), (3, 15, 22, 24))
LONG: dict[str, Any] = {"seq_length": LENGTH, "max_position_embeddings": LENGTH, "init_method_std": 0.1}

FORMS: list[dict[str, Any]] = [
    LLAMA,
    NEOX,
    {"pos_emb": "learned"},
    {"pos_emb": "sinusoidal"},
    {"pos_emb": "alibi"},
    {"sliding_window_width": 5},
    {"sliding_window_width": 3, "attention_config": [[["local", "global"], "all"]]},
    {"pos_emb": "alibi", "sliding_window_width": 4, "num_kv_heads": 4},
    {"num_kv_heads": 1, "use_qk_layernorm": True},
    {"norm_placement": "olmo3", "norm": "rmsnorm"},
]


def spans(row: int) -> list[slice]:
    ends = (0, *ENDS[row])
    return [slice(first, last) for first, last in pairwise(ends)]


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """tokens [2, 24], positions that restart at each document, document numbers."""
    tokens, positions, _ = batch(length=LENGTH)
    ids = torch.zeros_like(positions)
    positions = positions.clone()
    for row in range(2):
        for number, span in enumerate(spans(row)):
            ids[row, span] = number
            positions[row, span] -= span.start
    tokens[ids == 3] = 0  # padding is some valid id
    return tokens, positions, ids


def masked(**changes: Any) -> Any:
    return tiny(**{**LONG, "intra_document_masking": True, **changes})


def check_documents(run: Any, tolerance: float = 1e-6) -> None:
    """`run(tokens, positions, ids)` -> logits [b, s, v]: the two promises, for every document of every row."""
    tokens, positions, ids = packed()
    before = run(tokens, positions, ids)
    scale = before.abs().max().clamp(min=1)
    for number in range(4):
        others = ids != number
        after = run(torch.where(others, (tokens + 11) % VOCAB, tokens), positions, ids)
        assert torch.equal(before[~others], after[~others]), f"document {number} sees another"
        assert not torch.equal(before[others], after[others])
    for row in range(2):
        for span in spans(row):
            alone = run(*(x[row : row + 1, span].contiguous() for x in (tokens, positions, ids)))
            error = (before[row, span] - alone[0]).abs().max() / scale
            assert error < tolerance, f"row {row}, columns {span.start} to {span.stop}: {error:.1e}"


# FlexAttention is slow without a GPU: one form of each kind of position.
PAIRS = [(form, name) for form in FORMS for name in ("auto", "torch", "varlen", "manual")]
PAIRS += [(form, "flex") for form in (LLAMA, FORMS[4], FORMS[5], GEMMA2)]
PAIRS += [(form, "auto") for form in (GEMMA2, {**GEMMA2, "sliding_window_width": 4}, GEMMA3, PHI)]


@pytest.mark.parametrize(("changes", "backend"), PAIRS, ids=str)
@torch.no_grad()
def test_another_document_changes_nothing_and_alone_gives_the_same(changes: dict[str, Any], backend: str) -> None:
    network = build(masked(attention_backend=backend, **changes))
    check_documents(lambda *inputs: logits(network, *inputs))


@pytest.mark.parametrize("changes", FORMS, ids=str)
@torch.no_grad()
def test_restarting_positions_alone_is_not_enough(changes: dict[str, Any]) -> None:
    """What users believe to be masking and is not: the check above must see it."""
    network = build(tiny(**{**LONG, **changes}))
    with pytest.raises(AssertionError, match="sees another"):
        check_documents(lambda tokens, positions, ids: logits(network, tokens, positions))


@torch.no_grad()
def test_without_restarting_positions_alone_is_not_the_same() -> None:
    network = build(masked(pos_emb="learned"))
    columns = torch.arange(LENGTH)
    with pytest.raises(AssertionError, match="row 0, columns 7"):
        check_documents(
            lambda tokens, positions, ids: logits(
                network, tokens, columns[: tokens.shape[1]].expand_as(tokens).contiguous(), ids
            )
        )


POLICIES: list[dict[str, Any]] = [
    {},
    {"checkpoint_policy": "full"},
    {"checkpoint_policy": "selective"},
    {"num_layers": 4, "checkpoint_policy": "full", "checkpoint_num_layers": 2},
    {"attention_backend": "torch", "checkpoint_policy": "selective"},
]


def gradients(network: torch.nn.Module, wanted: Tensor) -> list[Tensor]:
    """Of the loss over the targets in `wanted` [b, s]."""
    tokens, positions, ids = packed()
    network.zero_grad()
    network((tokens, positions, ids), (tokens.roll(-1, 1), wanted.float(), torch.tensor([1.0])))[0].backward()
    return [p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize("changes", POLICIES, ids=str)
def test_gradients_do_not_cross_either(changes: dict[str, Any]) -> None:
    """And recomputation computes the same again."""
    network = build(masked(pos_emb="learned", no_weight_tying=True, **changes))
    tokens, _, ids = packed()
    gradients(network, ids == 1)
    grad = network.sequential[0].word_embeddings.weight.grad
    mine = tokens[ids == 1].unique()
    assert grad[mine].abs().max() > 0
    assert grad[[i for i in range(VOCAB) if i not in mine]].abs().max() == 0
    plain = {"checkpoint_policy": "none", "attention_backend": changes.get("attention_backend", "auto")}
    expected = gradients(build(masked(pos_emb="learned", no_weight_tying=True, **{**changes, **plain})), ids < 3)
    for one, other in zip(gradients(network, ids < 3), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        ({}, 0),
        ({"attention_backend": "torch"}, 1),
        ({"attention_backend": "torch", "sliding_window_width": 3}, 1),
        ({"attention_backend": "torch", "attention_config": [[["local", "global"], "all"]]}, 2),
    ],
    ids=str,
)
def test_masks_are_made_once_per_micro_batch(changes: dict[str, Any], masks: int, policy: str) -> None:
    """However many layers there are, and although activation checkpointing runs them twice."""
    window = {"sliding_window_width": 3} if "attention_config" in changes else {}
    network = build(masked(num_layers=6, checkpoint_policy=policy, **changes, **window))
    _, _, ids = packed()
    prepare = Documents.prepare
    with (
        mock.patch.object(documents, "visible_mask", side_effect=visible_mask) as made_masks,
        mock.patch.object(attention_contract, "visible_mask", side_effect=AssertionError),
        mock.patch.object(Documents, "prepare", autospec=True, side_effect=prepare) as prepared_batches,
        mock.patch.object(documents, "document_bounds", side_effect=documents.document_bounds) as bounds,
    ):
        gradients(network, ids < 3)
    assert prepared_batches.call_count == 1
    assert made_masks.call_count == masks
    assert bounds.call_count == (masks == 0)


@torch.no_grad()
def test_only_tensors_leave_a_stage() -> None:
    network = build(masked())
    tokens, positions, ids = packed()
    start = Carry.from_tensors((tokens, positions, ids))
    carry = sequential.run_layers(list(network.sequential)[:2], start, network.recompute)
    assert isinstance(carry.documents, Documents)
    tensors = carry.to_tensors()
    assert all(isinstance(x, Tensor) for x in tensors) and len(tensors) == 3 and tensors[2] is ids
    # A block by itself takes documents that are not prepared too.
    block = next(layer for layer in network.sequential if isinstance(layer, TransformerBlock))
    plain = start._replace(hidden=torch.randn(2 * LENGTH, 32, generator=torch.Generator().manual_seed(0)))
    ready = plain.prepare_documents(block.document_needs())
    assert ready.documents.bounds is not None and plain.documents.bounds is None
    assert (block(plain).hidden - block(ready).hidden).abs().max() < 1e-5


# -- over several ranks ---------------------------------------------------------------------------------------------

SPREAD: list[dict[str, Any]] = [
    LLAMA,
    NEOX,
    {"pos_emb": "learned"},
    {"pos_emb": "alibi", "sliding_window_width": 6},
    {**LLAMA, "attention_backend": "torch", "sliding_window_width": 5},
]


def _tensor_parallel(rank: int, world: int) -> None:
    for sequence_parallel in (False, True):
        topology = Topology({"pipe": 1, "data": 1, "model": world})
        state = ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel)
        for changes in SPREAD:
            network = build(masked(**changes), state, padding=128 * world)

            def run(*inputs: Tensor, network: Any = network, state: ParallelState = state) -> Tensor:
                return logits(network, *_even(inputs, state))

            with torch.no_grad():
                check_documents(run)


def _even(inputs: tuple[Tensor, ...], state: ParallelState) -> tuple[Tensor, ...]:
    """Two copies of a sample of odd length: sequence parallelism splits the tokens evenly."""
    odd = inputs[0].numel() % state.tp_size
    return tuple(torch.cat((x, x)) for x in inputs) if odd and state.sequence_parallel else inputs


@pytest.mark.timeout(150)
def test_two_tensor_parallel_ranks_with_and_without_sequence_parallelism() -> None:
    run_distributed(_tensor_parallel, 2, timeout=120)


def _stages(rank: int, world: int, tensor: int) -> None:
    """The stages' own functions, and what they hand over; every rank checks what the last stage says."""
    topology = Topology({"pipe": world // tensor, "data": 1, "model": tensor})
    state = ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel=tensor > 1)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    for changes in SPREAD:
        model = masked(**changes)
        layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=padded(128 * tensor), state=state)
        pipe = LayerPipe(layers, OBJECTIVES["normal"](), "type:transformer|mlp", SEED, state)
        randomise_vectors(pipe, state)

        def run(*inputs: Tensor, pipe: LayerPipe = pipe, state: ParallelState = state) -> Tensor:
            return _through_stages(pipe, _even(inputs, state), state, topology)

        with torch.no_grad():
            check_documents(run)


def _through_stages(pipe: LayerPipe, inputs: tuple[Tensor, ...], state: ParallelState, topology: Topology) -> Tensor:
    tokens, positions, ids = inputs
    here = topology.coord(state.rank)
    first, last = (topology.rank(**{**here, "pipe": stage}) for stage in (0, state.pp_size - 1))
    if state.is_first_stage:
        carry = pipe((tokens, positions, ids))
        assert len(carry) == 3 and all(isinstance(x, Tensor) for x in carry)
        for x in carry:
            dist.send(x.contiguous(), dst=last)
        out = torch.empty(*tokens.shape, VOCAB)
        dist.recv(out, src=last)
        return out
    rows = tokens.numel() // (state.tp_size if state.sequence_parallel else 1)
    carry = (torch.empty(rows, 32), torch.empty_like(positions), torch.empty_like(ids))
    for x in carry:
        dist.recv(x, src=first)
    out = pipe(carry).logits().contiguous()
    dist.send(out, dst=first)
    return out


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (4, 2)], ids=["pp2", "tp2pp2"])
def test_pipeline_stages(world: int, tensor: int) -> None:
    run_distributed(_stages, world, tensor, timeout=120)
