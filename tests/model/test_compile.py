"""Blocks are clean for torch.compile: one graph, no breaks, and no recompilation from layer to layer or step to step.

The back-end is "aot_eager" or "eager": tracing is what is tested, nothing is generated.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend, Call
from megatron.layers.attention_sdpa import manual
from megatron.model.block import TransformerBlock
from megatron.registry import ADDITIONS, withdraw
from megatron.training.compile import compile_blocks
from tests.model.networks import GEMMA2, GEMMA3, LLAMA, PHI, batch, build, logits, tiny
from tests.model.recurrent import BOTH, MAMBA_HYBRID
from tests.model.test_moe import EVERYTHING

pytestmark = pytest.mark.cpu

FORMS: list[dict[str, Any]] = [
    {},
    LLAMA,
    {"gpt_j_residual": True, "rotary_pct": 0.25},
    {"gpt_j_residual": True, "gpt_j_tied": True},
    {"norm_placement": "olmo3", "norm": "rmsnorm"},
    {"norm": "scalenorm"},
    {"norm": "non_parametric_layernorm"},
    {"use_qk_layernorm": True},
    {"use_qk_layernorm": True, "use_separate_qk_norms": True, "norm": "rmsnorm"},
    {"pos_emb": "alibi"},
    {"pos_emb": "learned"},
    {"sliding_window_width": 5},
    {"intra_document_masking": True},
    {"intra_document_masking": True, "attention_backend": "torch"},
    {"intra_document_masking": True, "attention_backend": "manual", "sliding_window_width": 5},
    {"intra_document_masking": True, "pos_emb": "alibi", "sliding_window_width": 5},
    {"intra_document_masking": True, "checkpoint_policy": "full"},
    {"intra_document_masking": True, "checkpoint_policy": "selective"},
    {"use_mup": True, "mup_base_hidden_size": 16},
    {"attention_backend": "manual"},
    {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    {"checkpoint_policy": "full"},
    {"checkpoint_policy": "selective"},
    GEMMA2,
    {**GEMMA2, "intra_document_masking": True, "sliding_window_width": 5},
    {**GEMMA3, "attention_config": None},
    PHI,
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_one_graph_serves_all_blocks_and_steps(changes: dict[str, Any]) -> None:
    network = build(tiny(num_layers=4, **changes))
    counter = CompileCounter()
    for layer in network.sequential:
        if isinstance(layer, TransformerBlock):
            layer.compile(backend=counter, fullgraph=True)
    for step in range(3):
        tokens, positions, targets = batch(seed=step)
        # Other numbers of documents, and other lengths, in each step.
        doc_ids = [positions // (7 - 3 * step)] if changes.get("intra_document_masking") else []
        network((tokens, positions, *doc_ids), (targets, torch.ones(targets.shape), torch.tensor([0.1])))[0].backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("positions_too", [False, True])
def test_a_second_kind_of_layer_costs_one_more_graph(positions_too: bool) -> None:
    layered = {"sliding_window_width": 3, "attention_config": [[["local", "global"], "all"]]}
    network = build(tiny(num_layers=4, **(GEMMA3 if positions_too else layered)))
    counter = CompileCounter()
    for layer in network.sequential[1:5]:
        layer.compile(backend=counter, fullgraph=True)
    tokens, positions, _ = batch()
    logits(network, tokens, positions)
    assert counter.frame_count == 2


SAME: list[dict[str, Any]] = [
    {},
    {"checkpoint_policy": "full"},
    {"checkpoint_policy": "selective"},
    {"intra_document_masking": True},
    {"intra_document_masking": True, "attention_backend": "torch", "checkpoint_policy": "selective"},
    {"intra_document_masking": True, "pos_emb": "alibi", "checkpoint_policy": "selective"},
]


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_compiled_blocks_compute_the_same(changes: dict[str, Any]) -> None:
    tokens, positions, targets = batch()
    labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
    gradients = []
    for compiled in (False, True):
        network = build(tiny(**changes))
        if compiled:
            for layer in network.sequential[1:3]:
                layer.compile(backend="aot_eager", fullgraph=True)
        doc_ids = [positions // 7] if changes.get("intra_document_masking") else []
        network((tokens, positions, *doc_ids), labels)[0].backward()
        gradients.append([p.grad for p in network.parameters()])
    for eager, traced in zip(*gradients, strict=True):
        assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-7)


# What is compiled of a network with breaks: (whole blocks, those around breaks, those by functions), graphs.
PIECES: list[tuple[dict[str, Any], int, tuple[int, int, int], int]] = [
    ({**MAMBA_HYBRID, "intra_document_masking": True, "checkpoint_policy": "full"}, 0, (2, 2, 0), 12),
    (BOTH, 0, (2, 2, 0), 10),
    ({**EVERYTHING, "checkpoint_policy": "full", "checkpoint_num_layers": 2}, 0, (1, 2, 0), 7),
    ({**EVERYTHING, "checkpoint_policy": "selective"}, 0, (1, 0, 2), 6),
    (LLAMA, 3, (0, 0, 2), 2),
    ({"attention_backend": "apart", "num_layers": 9}, 0, (0, 9, 0), 4),
    ({"attention_backend": "apart", "checkpoint_policy": "full"}, 0, (0, 2, 0), 4),
]


@pytest.fixture(autouse=True)
def _kernel_of_another_package() -> Iterator[None]:
    """`apart`, for the tests of this file alone."""
    added = len(ADDITIONS)
    ATTENTION_BACKENDS.register("apart")(_apart)
    yield
    withdraw(added)


def _apart() -> Backend:
    """A kernel that no graph can hold."""

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        assert not torch.compiler.is_compiling()
        return manual(q, k, v, call)

    return Backend(attend, one_graph=lambda task: False)


@pytest.mark.parametrize(("changes", "zero_stage", "counts", "graphs"), PIECES, ids=str)
def test_what_is_no_graph_is_compiled_around(
    changes: dict[str, Any], zero_stage: int, counts: tuple[int, int, int], graphs: int
) -> None:
    """The same numbers as without, with graphs that serve all blocks of a kind and every step."""
    counters.clear()
    plain, compiled = build(tiny(**changes)), build(tiny(**changes))
    backend = "eager" if "attention_config" in changes else "aot_eager"  # the graphs of recurrent blocks are many
    assert compile_blocks(compiled, zero_stage, backend) == counts
    for step in range(2):
        tokens, positions, targets = batch(seed=step)
        doc_ids = [positions // (7 - 3 * step)] if changes.get("intra_document_masking") else []
        labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
        losses = [network((tokens, positions, *doc_ids), labels)[0] for network in (plain, compiled)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        assert counters["stats"]["unique_graphs"] == graphs
    assert not [reason for reason in counters["graph_break"] if "torch.compiler.disable" not in reason]
    for eager, traced in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert (eager.grad is None) == (traced.grad is None)
        if eager.grad is not None:
            assert torch.allclose(eager.grad, traced.grad, rtol=1e-5, atol=1e-6)


def test_importing_the_network_does_not_import_the_compiler():
    """Over a second of every command, as a decorator `torch.compiler.disable` would cost."""
    code = "import sys, megatron.model.gpt; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
