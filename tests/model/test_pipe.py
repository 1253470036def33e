"""The list of layers under DeepSpeed: pipeline stages and ZeRO-3 train like the plain module.

One step of SGD at rate 1 without clipping: weight before - weight after is the gradient.
"""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import UserError
from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe, SequentialModel
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.objectives import OBJECTIVES
from tests.distributed import RankFailure, run_distributed
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
    padded,
    randomise_vectors,
    tiny,
)
from tests.model.recurrent import AMLP, RPE

pytestmark = pytest.mark.cpu

ROWS = 4  # two micro-batches of two
Weights = dict[str, Tensor]


def _labels() -> tuple[Tensor, Tensor, Tensor]:
    _, positions, targets = batch(rows=ROWS)
    mask = (positions % 3 > 0).float()
    mask[0, 5:] = 0  # micro-batches with different numbers of trained tokens
    return targets, mask, (2 / mask.sum()).reshape(1)


def _inputs(changes: dict[str, Any]) -> tuple[Tensor, ...]:
    tokens, positions, _ = batch(rows=ROWS)
    return (tokens, positions, (positions > 8).long()) if changes.get("intra_document_masking") else (tokens, positions)


def _state(rank: int, pipe: int, data: int, model: int) -> ParallelState:
    topology = Topology({"pipe": pipe, "data": data, "model": model})
    return ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel=model > 1)


def _config(micro_batch: int, gas: int, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
        "steps_per_print": 10**9,
    }


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _plain(changes: dict[str, Any]) -> tuple[float, Weights]:
    """Loss and gradients of the whole batch in one process."""
    network = build(tiny(**changes))
    targets, mask, _ = _labels()
    loss, _ = network(_inputs(changes), (targets, mask, (1 / mask.sum()).reshape(1)))
    loss.backward()
    return loss.item(), {name: p.grad.narrow(0, 0, p.spec.shape[0]) for name, p in named_parameters(network)}


def _pipeline(rank: int, world: int, forms: list[dict[str, Any]], tensor: int) -> list[tuple[float, Weights]]:
    state = _state(rank, world // tensor, 1, tensor)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    outcomes = []
    for changes in forms:
        layers = gpt_layers(tiny(**changes), vocab_size=VOCAB, padded_vocab_size=padded(128 * tensor), state=state)
        pipe = LayerPipe(layers, OBJECTIVES["normal"](), "type:transformer|mlp", SEED, state)
        randomise_vectors(pipe, state)
        engine, *_ = deepspeed.initialize(model=pipe, optimizer=_sgd(pipe), config=_config(2, 2, 0))
        before = {name: p.detach().clone() for name, p in named_parameters(pipe)}
        inputs, (targets, mask, weight) = _inputs(changes), _labels()
        rows = [slice(0, 2), slice(2, 4)]
        micro = [(tuple(x[r] for x in inputs), (targets[r], mask[r], weight)) for r in rows]
        with warnings.catch_warnings():
            # of the copy of tied weights between stages, which DeepSpeed makes part of the graph
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
            loss = engine.train_batch(iter(micro))
        outcomes.append((loss.item(), {name: before[name] - p.detach() for name, p in named_parameters(pipe)}))
    return outcomes


FORMS: list[dict[str, Any]] = [
    NEOX,
    {**LLAMA, "no_weight_tying": False},
    {"pos_emb": "learned", "num_layers": 3, "checkpoint_activations": True},
    {"num_layers": 4, "checkpoint_policy": "selective", "checkpoint_num_layers": 2, "intra_document_masking": True},
    {**GEMMA2, "intra_document_masking": True},
    {**GEMMA3, "checkpoint_policy": "selective"},
    PHI,
    {**RPE, "num_layers": 3, "checkpoint_policy": "full", "checkpoint_num_layers": 2},
    {**RPE, "intra_document_masking": True, "no_weight_tying": True},
    AMLP,
]


def _close(name: str, mine: Tensor, expected: Tensor) -> None:
    error = (mine.narrow(0, 0, expected.shape[0]) - expected).abs().max()
    assert error < 1e-5 * expected.abs().max().clamp(min=0.1), name


def test_two_stages_train_like_one_process() -> None:
    ranks = run_distributed(_pipeline, 2, FORMS, 1, timeout=100)
    for i, changes in enumerate(FORMS):
        loss, gradients = _plain(changes)
        tied = "0.word_embeddings.weight" if not changes.get("no_weight_tying") else None
        assert set(ranks[0][i][1]) & set(ranks[1][i][1]) == ({tied} if tied else set())
        assert set(ranks[0][i][1]) | set(ranks[1][i][1]) == set(gradients)
        for stage_loss, stage in (ranks[0][i], ranks[1][i]):
            assert stage_loss == pytest.approx(loss, rel=1e-5), changes
            for name, gradient in stage.items():
                _close(f"{changes} {name}", gradient, gradients[name])


def test_two_stages_of_two_tensor_parallel_ranks_with_sequence_parallel() -> None:
    forms = [{**NEOX, "no_weight_tying": False}]
    loss, gradients = _plain(forms[0])
    for (rank_loss, stage), *_ in run_distributed(_pipeline, 4, forms, 2, timeout=100):
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        for name in ("2.input_layernorm.weight", "3.attention.dense.bias", "5.norm.bias"):
            if name in stage:
                _close(name, stage[name], gradients[name])


def _sharded(
    rank: int, world: int, forms: list[dict[str, Any]], stage: int, early: bool
) -> list[tuple[float, Weights, Tensor]]:
    """Two data-parallel ranks; `early`: each layer is partitioned as soon as it is built."""
    state = _state(rank, 1, world, 1)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    outcomes = []
    for changes in forms:
        layers = gpt_layers(tiny(**changes), vocab_size=VOCAB, padded_vocab_size=padded(128), state=state)
        before: Weights = {}
        config = _config(2, 1, stage)

        def after_build(layer: torch.nn.Module, before: Weights = before, config: dict[str, Any] = config) -> None:
            randomise_vectors(layer, state)
            before.update((name, p.detach().clone()) for name, p in named_parameters(layer))
            if early:
                deepspeed.zero.Init(module=layer, config_dict_or_path=config)

        network = SequentialModel(layers, OBJECTIVES["normal"](), SEED, state, after_build)
        assert all((p.numel() == 0) == early for p in network.parameters())
        engine, *_ = deepspeed.initialize(model=network, optimizer=_sgd(network), config=config)
        mine = slice(2 * rank, 2 * rank + 2)
        targets, mask, weight = _labels()
        inputs = tuple(x[mine] for x in _inputs(changes))
        loss, _ = engine(inputs, (targets[mine], mask[mine], weight))
        engine.backward(loss)
        engine.step()
        after = {}
        for name, parameter in named_parameters(network):
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                after[name] = parameter.detach().clone()
        with torch.no_grad():
            out = engine(inputs, then=lambda out: out.logits())
        outcomes.append((loss.item() / 2, {name: before[name] - after[name] for name in after}, out))
    return outcomes


@pytest.mark.parametrize(("stage", "early"), [(1, False), (3, False), (3, True)])
def test_zero_trains_like_one_process(stage: int, early: bool) -> None:
    """Under stage 3 weights are whole only inside their module's forward: the head's as well, tied or not."""
    forms = [NEOX, {**LLAMA, "no_weight_tying": False, "checkpoint_policy": "full"}, {"pos_emb": "learned"}, RPE, AMLP]
    ranks = run_distributed(_sharded, 2, forms, stage, early, timeout=100)
    for i, changes in enumerate(forms):
        loss, gradients = _plain(changes)
        assert sum(rank[i][0] for rank in ranks) == pytest.approx(loss, rel=1e-5), changes
        for rank in ranks:
            assert rank[i][2].shape == (2, 16, VOCAB)
            for name, gradient in rank[i][1].items():
                _close(f"{changes} {name}", gradient, gradients[name])


def _too_many_stages(rank: int, world: int) -> None:
    state = _state(rank, world, 1, 1)
    dist.barrier()  # a rank that fails while the other still connects makes that one fail for another reason
    layers = gpt_layers(tiny(num_layers=1), vocab_size=VOCAB, padded_vocab_size=128, state=state)
    LayerPipe(layers, OBJECTIVES["normal"](), "type:transformer|mlp", SEED, state)


def test_a_stage_without_a_block_is_refused() -> None:
    with pytest.raises(RankFailure) as caught:
        run_distributed(_too_many_stages, 2, timeout=60)
    assert isinstance(caught.value.exceptions[0], UserError)
    assert "pipe_parallel_size: 2 stages for num_layers=1" in str(caught.value.exceptions[0])


def test_one_stage_is_not_a_pipeline() -> None:
    layers = gpt_layers(tiny(), vocab_size=VOCAB, padded_vocab_size=128, state=ParallelState.single())
    with pytest.raises(ValueError, match="SequentialModel"):
        LayerPipe(layers, OBJECTIVES["normal"](), "uniform", SEED, ParallelState.single())
