"""The layers of the guide's first example compute what its text says: alone, split, cached, and in packed documents."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.inference.stage import Stage
from megatron.layers.carry import Context
from megatron.layers.documents import Documents
from megatron.layers.kv_cache import KVCache, left_padded_positions
from megatron.layers.norms import NORMS
from megatron.layers.parts import MIXERS
from megatron.model.block import TransformerBlock
from megatron.model.gpt import gpt_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu.sharding import named_parameters, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs, plugin_key
from megatron.neox_arguments.derive import derive
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.objectives import OBJECTIVES
from tests.distributed import run_distributed
from tests.model.networks import SEED, VOCAB, batch, logits, padded, randomise_vectors
from tests.plugins.helpers import write_layers

pytestmark = pytest.mark.cpu

# Overrides, and whether the sequence is split too.
FORMS: list[tuple[tuple[str, ...], bool]] = [
    ((), False),
    ((), True),
    (("gpt_j_residual=true", "use_qk_layernorm=true"), False),
    (("gpt_j_residual=true", "gpt_j_tied=true"), True),
    (("norm_placement=sandwich", "intra_document_masking=true"), True),
]
Outcome = tuple[float, Tensor, dict[str, Tensor]]


def resolved(folder: Path, *overrides: str) -> dict[str, Any]:
    """The example's config as flat values, with a small model."""
    small = ("num_layers=2", "seq_length=16", "init_method_std=0.2", "no_weight_tying=true")
    return derive(NeoXArgs.from_files([str(write_layers(folder))], [*small, *overrides])).to_dict()


def build(model: ModelConfig, state: ParallelState) -> SequentialModel:
    """Weights depend on names and shapes alone; biases and norms are random too."""
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=padded(8 * state.tp_size), state=state)
    network = SequentialModel(layers, OBJECTIVES["focal"](), SEED, state)
    randomise_vectors(network, state)
    return network


@pytest.fixture
def single(tmp_path: Path) -> SequentialModel:
    return build(NeoXArgs.from_saved(resolved(tmp_path)).model, ParallelState.single())


# ---- against formulas


def average_by_loop(mixer: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
    """The mixer token by token in fp64: x [b, s, h], ids [b, s] of documents."""
    weights = {name: p.double() for name, p in mixer.named_parameters()}
    value, gate = F.linear(x.double(), weights["value_gate.weight"], weights["value_gate.bias"]).chunk(2, dim=-1)
    keep, average = torch.sigmoid(weights["keep"]), torch.zeros_like(value[:, 0])
    rows = []
    for t in range(x.shape[1]):
        same = torch.ones_like(ids[:, t]) if t == 0 else ids[:, t] == ids[:, t - 1]
        average = keep * average * same.unsqueeze(1) + (1 - keep) * value[:, t]
        rows.append(average * torch.sigmoid(gate[:, t]))
    return F.linear(torch.stack(rows, 1), weights["dense.weight"], weights["dense.bias"])


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_the_mixer_is_a_moving_average_within_documents(single, length: int, packed: bool) -> None:
    block = next(layer for layer in single.sequential if isinstance(layer, TransformerBlock))
    mixer = block.attention
    assert type(mixer) is MIXERS["average"] and mixer.value_gate.weight.shape == (64, 32)
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(length).expand(2, length)
    ids = (positions >= torch.tensor([[3], [5]])).long() + (positions >= 9).long() if packed else positions * 0
    out = mixer(x.reshape(-1, 32), Context(positions, Documents(ids) if packed else None)).view(2, length, 32)
    expected = average_by_loop(mixer, x, ids)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_half_life_of_the_slowest_channel_is_the_option(single) -> None:
    name, keep = next(pair for pair in named_parameters(single) if pair[0].endswith("attention.keep"))
    fresh = torch.empty(32)
    keep.spec.init(fresh, torch.Generator())
    assert name == "2.attention.keep" and keep.spec.split_dim == 0
    kept = torch.sigmoid(fresh)
    assert kept[-1].item() ** 4 == pytest.approx(0.5, rel=1e-5) and kept[0].item() == pytest.approx(0.5)


def test_norm_activation_and_objective_are_their_formulas(single) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)) * 3
    norm = next(m for m in single.modules() if isinstance(m, NORMS["absnorm"]))
    expected = x / (x.abs().mean(-1, keepdim=True) + 1e-8) * norm.scale
    torch.testing.assert_close(norm(x), expected)
    assert copy.deepcopy(norm).bfloat16()(x.bfloat16()).dtype == torch.bfloat16

    mlp = next(m for m in single.modules() if isinstance(m, TransformerBlock)).mlp
    up, gate = mlp.linear1(x).chunk(2, dim=-1)
    torch.testing.assert_close(mlp(x)[0], mlp.linear2(gate.clamp(min=0) ** 2 * up))

    tokens, positions, targets = batch()
    mask = (positions % 3 > 0).float()
    out = F.log_softmax(logits(single, tokens, positions).double(), dim=-1)
    logp = out.gather(2, targets.unsqueeze(2)).squeeze(2)
    expected_loss = ((1 - logp.exp()) ** 2 * -logp * mask).sum() * 0.25
    loss, metrics = single((tokens, positions), (targets, mask, torch.tensor([0.25])))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert metrics.tolist() == pytest.approx([((logp.exp() > 0.5) * mask).sum().item() * 0.25])
    assert single((tokens, positions), (targets, mask * 0, torch.tensor([0.25])))[0].item() == 0


# ---- split over ranks


def step(values: dict[str, Any], state: ParallelState) -> Outcome:
    """(loss, logits, gradients by name, this rank's parts) of one step."""
    args = NeoXArgs.from_saved(values)
    network = build(args.model, state)
    tokens, positions, targets = batch()
    ids = [(positions >= 6).long()] if args.model.intra_document_masking else []
    mask = (positions % 3 > 0).float()
    loss, _ = network((tokens, positions, *ids), (targets, mask, torch.tensor([0.05])))
    loss.backward()
    with torch.no_grad():
        out = logits(network, tokens, positions, *ids)
    return loss.item(), out, {name: p.grad for name, p in named_parameters(network)}


def split_step(rank: int, world: int, values: dict[str, Any], sequence_parallel: bool) -> Outcome:
    topology = Topology({"pipe": 1, "data": 1, "model": world})
    plugin_key.import_named(values["plugins"], "the test")  # as a rank does
    return step(values, ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel))


@pytest.mark.parametrize(("form", "sequence_parallel"), FORMS)
def test_two_ranks_compute_what_one_does(form, sequence_parallel: bool, tmp_path: Path) -> None:
    values = resolved(tmp_path, *form)
    loss, out, grads = step(values, ParallelState.single())
    results = run_distributed(split_step, 2, values, sequence_parallel)
    specs = {name: p.spec for name, p in named_parameters(build(NeoXArgs.from_saved(values).model, two_ranks()))}
    for other_loss, other_out, _ in results:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other_out, out, rtol=1e-4, atol=1e-5)
    for name, grad in grads.items():
        parts = [gradients[name] for _, _, gradients in results]
        spec = specs[name]
        real = unshard(parts, spec)
        grad = grad[: spec.shape[0]] if spec.padded else grad
        torch.testing.assert_close(real, grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def two_ranks() -> ParallelState:
    return ParallelState(Topology({"pipe": 1, "data": 1, "model": 2}), 0, "cpu")


# ---- generation


def test_token_by_token_is_the_whole_text_with_padding_on_the_left(single) -> None:
    network = copy.deepcopy(single)
    stage = Stage(list(network.sequential), ParallelState.single(), 32, torch.float32, 16)
    tokens, _, _ = batch(rows=3, length=12)
    start = torch.tensor([0, 4, 7])
    cache = stage.new_cache(12, start)

    @torch.inference_mode()
    def run(columns: Tensor, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        return stage.run(columns, positions, cache).logits()

    parts = [(0, 8), (8, 1), (9, 2), (11, 1)]
    seen = [run(tokens[:, i : i + n], left_padded_positions(start, i, n), cache) for i, n in parts]
    cached = torch.cat(seen, dim=1)
    for row, begin in enumerate(start.tolist()):
        alone = tokens[row : row + 1, begin:]
        whole = run(alone, torch.arange(12 - begin).unsqueeze(0))
        torch.testing.assert_close(cached[row, begin:], whole[0], rtol=1e-4, atol=1e-5)


def test_a_later_token_changes_no_earlier_output(single) -> None:
    tokens, positions, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB
    before, after = logits(single, tokens, positions), logits(single, changed, positions)
    assert torch.equal(before[:, :9], after[:, :9]) and not torch.equal(before[:, 9:], after[:, 9:])


def test_the_blocks_become_graphs(single) -> None:
    tokens, positions, _ = batch()
    expected = logits(single, tokens, positions)
    for layer in single.sequential:
        if isinstance(layer, TransformerBlock):
            layer.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(single, tokens, positions), expected, rtol=1e-5, atol=1e-6)
