"""Families against transformers' own classes: tensors bit for bit, logits and gradients at TP x PP, refusals."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.convert.export import export
from megatron.convert.family import FAMILIES, Constant, choose_family
from megatron.errors import UserError
from megatron.inference.stage import Stage
from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe, SequentialModel
from megatron.mpu.sharding import named_parameters, shard, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.objectives import OBJECTIVES
from tests.convert.families import FAMILY_CASES, GPT2, GROUPED, OLMO, PHI3, QWEN2, QWEN3
from tests.convert.helpers import VOCAB, full_tensors, hugging_face, resolved, specs_of, write_checkpoint
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

Outcome = tuple[Tensor | None, dict[str, Tensor]]
CASES = [pytest.param(architecture, keys, id=f"{architecture}: {name}") for architecture, name, keys in FAMILY_CASES]


@pytest.mark.parametrize(("architecture", "keys"), CASES)
def test_round_trip_is_bit_identical_and_computes_the_same(tmp_path, architecture, keys):
    args = resolved(**keys)
    model, theirs = hugging_face(args, architecture)
    assert type(model).__name__ == FAMILIES[architecture].architecture
    tp = 2 if args.model.num_kv_heads > 1 else 1
    folder = write_checkpoint(tmp_path / "ckpt", args, full_tensors(args, architecture, theirs), tp)
    done = export(folder, tmp_path / "hf", tokenizer=False, architecture=architecture)
    assert done.largest_difference < 1e-5
    written = load_file(tmp_path / "hf/model.safetensors")
    assert sorted(written) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(written[name], tensor), name


def _batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens, positions, targets, mask) [4, 12]: two micro-batches with different numbers of trained tokens."""
    text = torch.randint(VOCAB, (4, 13), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(12).expand(4, 12).contiguous()
    mask = (positions % 3 > 0).float()
    mask[0, 5:] = 0
    return text[:, :-1].contiguous(), positions, text[:, 1:].contiguous(), mask


def _reference(architecture: str, keys: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """transformers' (logits, our parameters, their gradients) of a random model."""
    args = resolved(**keys)
    model, theirs = hugging_face(args, architecture)
    tokens, _, targets, mask = _batch()
    logits = model(tokens, use_cache=False).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    ((losses * mask.flatten()).sum() / mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), full_tensors(args, architecture, theirs), full_tensors(args, architecture, gradients)


def _ranks(rank: int, world: int, pipe: int, forms: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> list[Outcome]:
    """Logits and the gradients of one step (weights before and after SGD at rate 1) on this rank of a layout."""
    topology = Topology({"pipe": pipe, "data": 1, "model": world // pipe})
    state = ParallelState.build(topology, rank, torch.device("cpu"))
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    return [_step(state, keys, weights) for keys, weights in forms]


def _step(state: ParallelState, keys: dict[str, Any], weights: dict[str, Tensor]) -> Outcome:
    model = resolved(**keys).model
    unit = 8 * state.tp_size
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=-(-VOCAB // unit) * unit, state=state)
    objective = OBJECTIVES["normal"]
    if state.pp_size == 1:
        network: nn.Module = SequentialModel(layers, objective, 0, state)
        modules = list(network.sequential)
    else:
        network = LayerPipe(layers, objective, "type:transformer|mlp", 0, state)
        modules = [module for module in network.forward_funcs if isinstance(module, nn.Module)]
    before = {}
    with torch.no_grad():
        for name, p in named_parameters(network):
            p.copy_(shard(weights[name], p.spec, state.tp_rank, state.tp_size))
            before[name] = p.detach().clone()
    tokens, positions, targets, mask = _batch()
    _train(network, state, (tokens, positions), (targets, mask))
    gradients = {}
    with torch.no_grad():
        for name, p in named_parameters(network):
            gradients[name] = before[name] - p
            p.copy_(before[name])
    stage = Stage(modules, state, model.hidden_size, torch.float32, model.max_position_embeddings)
    with torch.inference_mode():
        out = stage.run(tokens, positions)
        logits = None if out is None else out.logits()
    return logits, gradients


def _train(network: nn.Module, state: ParallelState, inputs: tuple[Tensor, ...], labels: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    targets, mask = labels
    if state.pp_size == 1:
        network(inputs, (targets, mask, 1 / mask.sum())).backward()
        optimizer.step()
        return
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    rows = (slice(0, 2), slice(2, 4))
    weight = 2 / mask.sum()
    engine.train_batch(iter([(tuple(x[r] for x in inputs), (targets[r], mask[r], weight)) for r in rows]))


@pytest.mark.parametrize(("tensor", "pipe"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logits_and_gradients_are_those_of_transformers_at_any_layout(tensor, pipe):
    cases = [(a, name, keys) for a, name, keys in FAMILY_CASES if resolved(**keys).model.num_kv_heads % tensor == 0]
    references = [_reference(architecture, keys) for architecture, _, keys in cases]
    forms = [(keys, weights) for (_, _, keys), (_, weights, _) in zip(cases, references, strict=True)]
    ranks = run_distributed(_ranks, tensor * pipe, pipe, forms, timeout=300)
    topology = Topology({"pipe": pipe, "data": 1, "model": tensor})
    for i, (architecture, name, keys) in enumerate(cases):
        logits, _, gradients = references[i]
        specs = specs_of(resolved(**keys), tensor)
        for rank, outcomes in enumerate(ranks):
            last = topology.coord(rank)["pipe"] == pipe - 1
            assert (outcomes[i][0] is not None) == last
            if last:
                error = (outcomes[i][0] - logits).abs().max()
                assert error < 1e-5 * logits.abs().max().clamp(min=1), (architecture, name, error)
        for parameter, expected in gradients.items():
            parts = [outcomes[i][1][parameter] for outcomes in ranks if parameter in outcomes[i][1]]
            parts = parts[:tensor]
            mine = unshard(parts, specs[parameter]) if specs[parameter].split_dim is not None else parts[0]
            error = (mine[: expected.shape[0]] - expected).abs().max()
            assert error < 1e-5 * expected.abs().max().clamp(min=0.1), (architecture, name, parameter, error)
            assert expected.abs().max() > 0, (architecture, name, parameter)


REFUSALS = [
    ("qwen2", {**QWEN2, "use_bias_in_attn_output": True}, "not on the output"),
    ("qwen2", QWEN3, "head_dim: 16"),
    ("qwen3", GROUPED, "normalises each head"),
    ("qwen3", {**QWEN3, "use_bias_in_mlp": True}, "use_bias_in_mlp"),
    ("olmo2", {**OLMO, "sliding_window_width": 8}, "try --architecture olmo3"),
    ("olmo3", GROUPED, "norms stand behind"),
    ("olmo3", {**OLMO, "qk_norm_per_head": True}, "over all heads"),
    ("llama", QWEN2, "use_bias_in_attn_output: false"),
    ("llama", QWEN3, "use_separate_qk_norms"),
    ("llama", OLMO, "norm_placement: olmo3"),
    ("neox", {**GROUPED, "head_dim": 16}, "head_dim: 16"),
    ("gpt2", {**GPT2, "pos_emb": "rotary"}, "learned positions only"),
    ("gpt2", {**GPT2, "num_kv_heads": 2}, "no grouped-query"),
    ("falcon", {**GPT2, "pos_emb": "rotary", "use_bias_in_mlp": False}, "everywhere or nowhere"),
    ("falcon", {**GPT2, "pos_emb": "rotary", "num_kv_heads": 2}, "one, or one per head"),
    ("phi3", {**PHI3, "use_bias_in_mlp": True}, "no biases"),
]


@pytest.mark.parametrize(("architecture", "keys", "message"), REFUSALS)
def test_what_a_family_cannot_express_is_named(architecture, keys, message):
    with pytest.raises(UserError, match=message):
        choose_family(resolved(**keys).model, architecture)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [("qwen2", QWEN2), ("qwen3", QWEN3), ("olmo2", OLMO), ("gpt2", GPT2), ("phi3", PHI3), ("llama", GROUPED)],
)
def test_the_family_is_found_without_being_named(architecture, keys):
    assert choose_family(resolved(**keys).model, None) is FAMILIES[architecture]


@pytest.mark.parametrize(("architecture", "keys"), CASES)
def test_the_table_names_every_parameter_once(architecture, keys):
    args = resolved(**keys)
    table = FAMILIES[architecture].table(args.model)
    ours = [rule.ours for rule in table if not isinstance(rule, Constant)]
    assert sorted(ours) == sorted(specs_of(args, 1))
