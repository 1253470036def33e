"""Tensor parallel 2 and sequence parallel compute what one rank computes: logits, loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megatron.layers.carry import Carry, Context
from megatron.model.block import TransformerBlock
from megatron.mpu.sharding import named_parameters, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.training.compile import compile_blocks
from tests.distributed import run_distributed
from tests.model.networks import GEMMA2, GEMMA3, LLAMA, NEOX, PHI, VOCAB, batch, build, logits, tiny
from tests.model.recurrent import AMLP, AMLP_HYBRID, RPE

pytestmark = pytest.mark.cpu

FORMS: list[dict[str, Any]] = [
    NEOX,
    LLAMA,
    {"pos_emb": "learned"},
    {"pos_emb": "alibi", "use_qk_layernorm": True},
    {"pos_emb": "sinusoidal", "norm": "scalenorm", "activation": "geglu", "intermediate_size": 48},
    {"use_qk_layernorm": True, "use_separate_qk_norms": True, "norm_placement": "olmo3", "norm": "rmsnorm"},
    {"use_separate_qk_norms": True, "qk_norm_per_head": True, "head_dim": 12, "use_bias_in_attn_output": False},
    {"gpt_j_residual": True, "gpt_j_tied": True},
    {"gpt_j_residual": True, "use_bias_in_mlp": False, "norm": "non_parametric_layernorm"},
    {"num_kv_heads": 4, "checkpoint_policy": "selective", "sliding_window_width": 4},
    {"use_qk_layernorm": True, "norm": "rmsnorm", "checkpoint_policy": "full", "checkpoint_num_layers": 2},
    GEMMA2,
    GEMMA3,
    PHI,
    RPE,
    {**RPE, "attention_backend": "manual", "checkpoint_policy": "selective"},
    AMLP,
    {**AMLP_HYBRID, "norm": "layernorm", "checkpoint_policy": "full", "intra_document_masking": True},
    {"intra_document_masking": True, "use_mup": True, "mup_base_hidden_size": 16, "mup_embedding_mult": 2.0},
]

Outcome = tuple[float, Tensor, dict[str, Tensor]]


def _tensor_parallel_state(rank: int, world: int, sequence_parallel: bool) -> ParallelState:
    topology = Topology({"pipe": 1, "data": 1, "model": world})
    return ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel)


def _step(changes: dict[str, Any], state: ParallelState, padding: int, backend: str | None = None) -> Outcome:
    torch._dynamo.reset()
    network = build(tiny(**{"init_method_std": 0.2, **changes}), state, padding=padding)
    if backend is not None:
        for layer in network.sequential:
            if isinstance(layer, TransformerBlock):
                layer.compile(backend=backend, fullgraph=True)
    tokens, positions, targets = batch()
    doc_ids = [(positions >= 6).long()] if changes.get("intra_document_masking") else []
    mask = (positions % 3 > 0).float()
    loss, _ = network((tokens, positions, *doc_ids), (targets, mask, torch.tensor([0.05])))
    loss.backward()
    with torch.no_grad():
        out = logits(network, tokens, positions, *doc_ids)
    return loss.item(), out, {name: p.grad for name, p in named_parameters(network)}


def _steps(
    rank: int, world: int, forms: list[dict[str, Any]], sequence_parallel: bool, backend: str | None = None
) -> list[Outcome]:
    state = _tensor_parallel_state(rank, world, sequence_parallel)
    # Another padding than on one rank: 2 x 40 rows, so that the second rank's padding is not a whole shard.
    return [_step(changes, state, padding=80, backend=backend) for changes in forms]


def _compare(forms: list[dict[str, Any]], ranks: list[list[Outcome]]) -> None:
    whole = [_step(changes, ParallelState.single(), padding=1) for changes in forms]
    for i, changes in enumerate(forms):
        loss, out, gradients = whole[i]
        specs = {name: p.spec for name, p in named_parameters(build(tiny(**changes), padding=80))}
        for rank in ranks:
            assert rank[i][0] == pytest.approx(loss, rel=1e-5), changes
            assert rank[i][1].shape == (2, 16, VOCAB)
            assert (rank[i][1] - out).abs().max() < 1e-5 * out.abs().max().clamp(min=1), changes
        assert set(ranks[0][i][2]) == set(gradients)
        for name, expected in gradients.items():
            parts = [rank[i][2][name] for rank in ranks]
            if specs[name].split_dim is None:
                assert torch.equal(parts[0], parts[1]), (changes, name)
            expected = expected.narrow(0, 0, specs[name].shape[0])
            error = (unshard(parts, specs[name]) - expected).abs().max()
            assert error < 1e-5 * expected.abs().max().clamp(min=1), (changes, name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equal_to_one_rank(sequence_parallel: bool) -> None:
    _compare(FORMS, run_distributed(_steps, 2, FORMS, sequence_parallel, timeout=90))


def test_equal_to_one_rank_when_blocks_are_compiled() -> None:
    forms = [NEOX, FORMS[5], FORMS[9]]
    _compare(forms, run_distributed(_steps, 2, forms, True, "aot_eager", timeout=240))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equal_to_one_rank_with_the_code_that_inductor_makes(sequence_parallel: bool) -> None:
    """Its own lowering of collectives: buffers that it reuses in place, where it waits, what it moves across them."""
    forms = [{**LLAMA, "checkpoint_policy": "selective" if sequence_parallel else "none"}]
    _compare(forms, run_distributed(_steps, 2, forms, sequence_parallel, "inductor", timeout=580))


def _count_graphs(rank: int, world: int) -> list[int]:
    counts = []
    for sequence_parallel in (False, True):
        state = _tensor_parallel_state(rank, world, sequence_parallel)
        for changes in (NEOX, {"norm": "rmsnorm", "gpt_j_residual": True, "gpt_j_tied": True}):
            torch._dynamo.reset()
            network = build(tiny(**{**changes, "num_layers": 3}), state, padding=80)
            counter = CompileCounter()
            for layer in network.sequential[1:4]:
                layer.compile(backend=counter, fullgraph=True)
            tokens, positions, targets = batch()
            network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([1.0])))[0].backward()
            counts.append(counter.frame_count)
    return counts


def test_one_graph_serves_all_blocks_under_tensor_parallel() -> None:
    assert run_distributed(_count_graphs, 2, timeout=120) == [[1] * 4] * 2


def _dropout(rank: int, world: int, sequence_parallel: bool) -> tuple[Tensor, Tensor, float]:
    """Which hidden units are dropped after the embedding; what equal heads give under attention dropout; the loss."""
    state = _tensor_parallel_state(rank, world, sequence_parallel)
    network = build(tiny(hidden_dropout=0.5, attention_dropout=0.5), state, padding=80)
    tokens, positions, targets = batch()
    torch.manual_seed(4)
    loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([1.0])))
    embedded = network.sequential[0](Carry(tokens, positions)).hidden
    attention = network.sequential[1].attention
    with torch.no_grad():  # all scores 0, all values 1: a head shows the mask of its weights
        attention.query_key_value.weight.zero_()
        attention.query_key_value.bias.fill_(1.0)
    seen: list[Tensor] = []
    attention.dense.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    attention(torch.zeros_like(embedded), Context(positions))
    return embedded == 0, seen[0], loss.item()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_agrees_where_tensors_are_replicated_and_differs_where_they_are_split(sequence_parallel: bool) -> None:
    (first, heads, loss), (second, other_heads, other_loss) = run_distributed(_dropout, 2, sequence_parallel)
    assert torch.equal(first, second) != sequence_parallel
    assert first.float().mean().item() == pytest.approx(0.5, abs=0.06)
    assert not torch.equal(heads, other_heads)
    assert loss == other_loss


def _masked(rank: int, world: int, sequence_parallel: bool) -> list[tuple[tuple[int, int, int] | None, float, Tensor]]:
    """(what is compiled, loss, a gradient) with dropout, without and with compilation, from the same random state."""
    state = _tensor_parallel_state(rank, world, sequence_parallel)
    outcomes = []
    for compiled in (False, True):
        network = build(tiny(**LLAMA, hidden_dropout=0.2, attention_dropout=0.2), state, padding=80)
        counts = compile_blocks(network, backend="aot_eager") if compiled else None
        tokens, positions, targets = batch()
        torch.manual_seed(4)
        loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([0.1])))
        loss.backward()
        outcomes.append((counts, loss.item(), network.sequential[1].mlp.linear2.weight.grad))
    return outcomes


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_blocks_are_compiled_around_masks_that_ranks_agree_on(sequence_parallel: bool) -> None:
    for (_, loss, gradient), (counts, again, traced) in run_distributed(_masked, 2, sequence_parallel, timeout=120):
        assert counts == (0, 2, 0)
        assert again == loss
        torch.testing.assert_close(traced, gradient)
