"""Families against transformers' own classes: tensors bit for bit, logits and gradients at TP x PP, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.families import FAMILIES, choose_family
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.streamed import folder_outputs
from megatron.convert.outputs import TOLERANCE, checkpoint_outputs, compare_outputs, random_tokens
from megatron.convert.parts.family import Constant, Family
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.errors import UserError
from megatron.inference.generate import Limits, generate
from megatron.inference.sampling import Sampling
from megatron.inference.stage import Stage
from megatron.layers.positions.rope_scaling import switch_length
from megatron.model.gpt import gpt_layers
from megatron.model.pipe import LayerPipe, SequentialModel
from megatron.mpu.sharding import ParamSpec, named_parameters, shard, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import is_gated
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.objectives import OBJECTIVES
from tests.convert.families import gemma_phi_cases as gemma_phi
from tests.convert.families import mamba_cases as mamba
from tests.convert.families import moe_cases as moe
from tests.convert.families import rwkv_cases as rwkv
from tests.convert.families.cases import FAMILY_CASES, GPT2, GROUPED, OLMO, PHI3, QWEN2, QWEN3
from tests.convert.helpers import (
    VOCAB,
    full_tensors,
    hugging_face,
    random_tensors,
    resolved,
    specs_of,
    write_checkpoint,
)
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

# State spaces amplify rounding: where transformers itself is further than 1e-5 from its own fp64, we may be this many
# times as far from it.
ROUNDED = 3
PROMPTS, NEW_TOKENS, END = ([5, 9, 33, 2, 8, 61, 17], [8, 40]), 8, VOCAB - 1


@dataclass(frozen=True)
class Reference:
    """What transformers makes of a random model: logits, our parameters and their gradients, greedy texts."""

    logits: Tensor
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    texts: list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """The same of one of our ranks: logits on the last stage, its parameters' gradients, texts cached and not."""

    logits: Tensor | None
    gradients: dict[str, Tensor]
    texts: list[list[list[int]]]


CASES = [pytest.param(architecture, keys, id=f"{architecture}: {name}") for architecture, name, keys in FAMILY_CASES]
ARCHITECTURES = list(dict.fromkeys(architecture for architecture, _, _ in FAMILY_CASES))


def test_every_family_has_cases():
    assert set(ARCHITECTURES) == set(FAMILIES)


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


def _reference(architecture: str, keys: dict[str, Any]) -> Reference:
    args = resolved(**keys)
    model, theirs = hugging_face(args, architecture)
    logits, gradients = _their_step(model, args, architecture)
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": END, "pad_token_id": END}
    texts = [model.generate(torch.tensor([p]), **greedy)[0, len(p) :].tolist() for p in PROMPTS]
    weights = full_tensors(args, architecture, theirs)
    return Reference(logits, weights, gradients, texts)


def _their_step(model: Any, args: NeoXArgs, architecture: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients by our names."""
    tokens, _, targets, mask = _batch()
    logits = model(tokens, use_cache=False).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    ((losses * mask.flatten()).sum() / mask.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return logits.detach(), full_tensors(args, architecture, gradients)


@cache
def _rounding(case: str) -> tuple[float, dict[str, float]]:
    """What transformers' own model in fp32 is off its model in fp64: (logits, relative error of each gradient)."""
    architecture, keys = next((a, keys) for a, name, keys in FAMILY_CASES if case == f"{a}: {name}")
    args = resolved(**keys)
    one, two = (
        _their_step(m, args, architecture)
        for m in (hugging_face(args, architecture)[0], hugging_face(args, architecture)[0].double())
    )
    return float((one[0] - two[0]).abs().max()), {name: _relative(g, two[1][name]) for name, g in one[1].items()}


def _relative(mine: Tensor, wanted: Tensor) -> float:
    return float((mine - wanted).abs().max() / wanted.abs().max().clamp(min=0.1))


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    """By `family: case`."""
    return {f"{a}: {name}": _reference(a, keys) for a, name, keys in FAMILY_CASES}


def _ranks(rank: int, world: int, pipe: int, forms: list[tuple[dict[str, Any], dict[str, Tensor]]]) -> list[Outcome]:
    """What this rank of a layout makes of every form; gradients are what SGD at rate 1 takes off the weights."""
    topology = Topology({"pipe": pipe, "data": 1, "model": world // pipe})
    state = ParallelState.build(topology, rank, torch.device("cpu"))
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    return [_step(state, keys, weights) for keys, weights in forms]


def _step(state: ParallelState, keys: dict[str, Any], weights: dict[str, Tensor]) -> Outcome:
    model = resolved(**keys).model
    unit = 8 * state.tp_size
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=-(-VOCAB // unit) * unit, state=state)
    objective = OBJECTIVES["normal"]()
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
    limits = (model.max_position_embeddings, switch_length(model.rope_scaling))
    stage = Stage(modules, state, model.hidden_size, torch.float32, *limits)
    with torch.inference_mode():
        out = stage.run(tokens, positions)
        logits = None if out is None else out.logits()
    texts = []
    for use_cache in (True, False):
        done = generate(stage, PROMPTS, Limits(NEW_TOKENS, END, (END,)), Sampling(), use_cache=use_cache)
        texts.append([[*text.tokens, END] if text.finished else text.tokens for text in done])
    return Outcome(logits, gradients, texts)


def _train(network: nn.Module, state: ParallelState, inputs: tuple[Tensor, ...], labels: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    targets, mask = labels
    if state.pp_size == 1:
        network(inputs, (targets, mask, (1 / mask.sum()).reshape(1)))[0].backward()
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
    weight = (2 / mask.sum()).reshape(1)
    engine.train_batch(iter([(tuple(x[r] for x in inputs), (targets[r], mask[r], weight)) for r in rows]))


def _divides(keys: dict[str, Any], tensor: int) -> bool:
    try:
        resolved(**keys, model_parallel_size=tensor)
    except UserError:
        return False
    return True


WITHOUT_ATTENTION = {architecture for architecture, _, keys in FAMILY_CASES if keys["pos_emb"] == "none"}
VARIANTS: dict[str, list[Any]] = {
    "num_kv_heads": [4, 2, 1],
    "no_weight_tying": [True, False],
    "use_bias_in_attn_linear": [True, False],
    "use_bias_in_mlp": [True, False],
    "sliding_window_width": [None, 5],
}


@pytest.mark.parametrize(
    ("architecture", "key"),
    [(a, key) for a in ARCHITECTURES for key in VARIANTS if a not in WITHOUT_ATTENTION or key == "no_weight_tying"],
)
def test_the_cases_have_every_variant_that_a_family_expresses(architecture, key):
    models = [resolved(**keys).model for a, _, keys in FAMILY_CASES if a == architecture]
    for value in VARIANTS[key]:
        variant = [replace(model, **{key: value}, **_follows(model, key, value)) for model in models]
        if any(_expresses(FAMILIES[architecture], model) for model in variant):
            assert any(getattr(model, key) == value for model in models), value


def _expresses(family: Family, model: ModelConfig) -> bool:
    """Also without tensors that only their model has."""
    return family.unsupported(model) == [] and not any(isinstance(rule, Constant) for rule in family.table(model))


def _follows(model: ModelConfig, key: str, value: Any) -> dict[str, Any]:
    return {"layer_windows": (value,) * model.num_layers} if key == "sliding_window_width" else {}


@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_logits_gradients_and_texts_are_those_of_transformers_at_any_layout(references, request, tensor, pipe):
    cases = {f"{a}: {name}": keys for a, name, keys in FAMILY_CASES if _divides(keys, tensor)}
    forms = [(keys, references[case].weights) for case, keys in cases.items()]
    ranks = run_distributed(_ranks, tensor * pipe, pipe, forms, timeout=300)
    topology = Topology({"pipe": pipe, "data": 1, "model": tensor})
    for i, (case, keys) in enumerate(cases.items()):
        outcomes, expected = [of_rank[i] for of_rank in ranks], references[case]
        last = [topology.coord(rank)["pipe"] == pipe - 1 for rank in range(len(ranks))]
        assert [outcome.logits is not None for outcome in outcomes] == last
        allowed = 1e-5 * float(expected.logits.abs().max().clamp(min=1))
        error = max(float((o.logits - expected.logits).abs().max()) for o in outcomes if o.logits is not None)
        request.node.user_properties.append((f"{case}: logits", error))
        assert error < allowed or error < ROUNDED * _rounding(case)[0], (case, error)
        assert all(text == expected.texts for outcome in outcomes for text in outcome.texts), case
        error = max(_gradient_errors(case, outcomes, expected.gradients, specs_of(resolved(**keys), tensor), tensor))
        request.node.user_properties.append((f"{case}: gradients", error))


def _gradient_errors(
    case: str, outcomes: list[Outcome], expected: dict[str, Tensor], specs: dict[str, ParamSpec], tensor: int
) -> Iterator[float]:
    """Checks them, and gives the largest error of each parameter, relative to its largest entry."""
    for name, wanted in expected.items():
        parts = [outcome.gradients[name] for outcome in outcomes if name in outcome.gradients][:tensor]
        mine = unshard(parts, specs[name]) if specs[name].split_dim is not None else parts[0]
        error = _relative(mine[: wanted.shape[0]], wanted)
        assert error < 1e-5 or error < ROUNDED * _rounding(case)[1][name], (case, name, error)
        assert wanted.abs().max() > 0, (case, name)
        yield error


def _swaps(tensors: dict[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(what, tensors of a model whose middle block is wrong): each weight in the place of the last block's; and parts
    of its own weights in each other's place: keys and values, both halves of a gated layer, two experts."""
    kv = (model.num_kv_heads or 0) * (model.head_dim or 0)
    for name, tensor in tensors.items():
        if not name.startswith("3."):
            continue
        other = "4." + name[2:]
        yield name, {**tensors, name: tensors[other], other: tensor}
        if name.endswith("query_key_value.weight"):
            q, k, v = tensor.split((len(tensor) - 2 * kv, kv, kv))
            yield f"{name}: k, v", {**tensors, name: torch.cat((q, v, k))}
        if "mlp" in name and "linear1" in name and is_gated(model.activation):
            dim = 1 if ".experts." in name else 0
            yield f"{name}: up, gate", {**tensors, name: torch.cat(tensor.chunk(2, dim)[::-1], dim)}
        if ".experts." in name:
            yield f"{name}: experts", {**tensors, name: tensor.flip(0)}


def _any_number(keys: dict[str, Any]) -> dict[str, Any]:
    """Kinds of mixers that do not count the layers."""
    listed = isinstance((keys.get("attention_config") or [None])[0], str)
    return {"attention_config": None} if listed else {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_swapped_weights_of_the_same_shape_are_noticed_and_their_block_named(tmp_path, architecture):
    """Of a model of three blocks, each weight of the middle one with the last one's, biases and norms too."""
    keys = next(keys for a, _, keys in FAMILY_CASES if a == architecture)
    args = resolved(**{**keys, "num_layers": 3, **_any_number(keys)})
    tensors = random_tensors(args, architecture)
    export(write_checkpoint(tmp_path / "right", args, tensors), tmp_path / "hf", tokenizer=False)
    tokens = random_tokens(VOCAB, args.model.max_position_embeddings, args.model.layer_windows or ())
    theirs = folder_outputs(HuggingFaceFolder(tmp_path / "hf"), tokens)
    for i, (name, swapped) in enumerate(_swaps(tensors, args.model)):
        reader = CheckpointReader(open_checkpoint(write_checkpoint(tmp_path / f"wrong{i}", args, swapped)))
        result = compare_outputs(checkpoint_outputs(reader, args.model, tokens, torch.float32), theirs)
        assert not result.ok and result.logits > 100 * TOLERANCE, (name, result)
        assert result.first_drift.startswith("block 1"), (name, result)


REFUSALS = [
    ("qwen2", {**QWEN2, "use_bias_in_attn_output": True}, "not on the output"),
    ("qwen2", QWEN3, "head_dim: 16"),
    ("qwen3", GROUPED, "normalises each head"),
    ("qwen3", {**QWEN3, "use_bias_in_mlp": True}, "use_bias_in_mlp"),
    ("olmo2", {**OLMO, "sliding_window_width": 8}, "try --architecture olmo3"),
    ("olmo3", GROUPED, "norm_placement: pre"),
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
    *gemma_phi.REFUSALS,
    *mamba.REFUSALS,
    *rwkv.REFUSALS,
    *moe.REFUSALS,
]


@pytest.mark.parametrize(("architecture", "keys", "message"), REFUSALS)
def test_what_a_family_cannot_express_is_named(architecture, keys, message):
    with pytest.raises(UserError, match=message):
        choose_family(resolved(**keys).model, architecture)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        *[("qwen2", QWEN2), ("qwen3", QWEN3), ("olmo2", OLMO), ("gpt2", GPT2), ("phi3", PHI3), ("llama", GROUPED)],
        *gemma_phi.FOUND,
        *mamba.FOUND,
        *rwkv.FOUND,
        *moe.FOUND,
    ],
)
def test_the_family_is_found_without_being_named(architecture, keys):
    assert choose_family(resolved(**keys).model, None) is FAMILIES[architecture]


@pytest.mark.parametrize(("architecture", "keys"), CASES)
def test_the_table_names_every_parameter_once(architecture, keys):
    args = resolved(**keys)
    table = FAMILIES[architecture].table(args.model)
    ours = [rule.ours for rule in table if not isinstance(rule, Constant)]
    assert sorted(ours) == sorted(specs_of(args, 1))
