"""A checkpoint's weights in a model with more blocks or another vocabulary: whose rows they are, at any layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.base import Opening, open_reader
from megatron.checkpoint.compare import check_config
from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.grown import GrownReader, Growth
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.layout import parameter_order
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.errors import UserError
from megatron.model.specs import model_specs as network_specs
from megatron.mpu.initial_weights import initial_value
from megatron.mpu.sharding import unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.checkpoint.fake_engine import HEADS, VOCAB, FakeEngine, full_value, model_specs
from tests.checkpoint.neox_files import write_neox
from tests.checkpoint.starts import decide, put
from tests.convert.helpers import NEOX, hugging_face, resolved
from tests.convert.helpers import VOCAB as NEOX_VOCAB
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

SEED, OLD, RUN = 5, 1, 7  # of what the engine holds before, of the checkpoint, of the run that grows


def engine_at(rank: int, layout: tuple[int, int, int], seed: int, tied: bool, **sizes: int) -> FakeEngine:
    pp, dp, tp = layout
    if layout == (1, 1, 1):
        return FakeEngine(ParallelState.single(), seed, HEADS, tied, **sizes)
    state = ParallelState.build(Topology({"pipe": pp, "data": dp, "model": tp}), rank, "cpu")
    return FakeEngine(state, seed, HEADS, tied, **sizes)


def save(rank, world, root, layout, tied):
    engine = engine_at(rank, layout, OLD, tied)
    save_checkpoint(root, 1, engine, engine.state, heads=HEADS, consumed=8, client={}, config={})


def load(rank, world, root, layout, tied, growth, sizes):
    engine = engine_at(rank, layout, SEED, tied, **sizes)
    opened = open_checkpoint(f"{root}/global_step1")
    load_checkpoint(opened, engine, engine.state, heads=HEADS, load_optim=False, load_rng=False, growth=growth)
    assert all(torch.equal(engine.masters[name], p.float()) for name, p in engine.params().items())
    return {(name, engine.state.tp_rank): p.detach() for name, p in engine.params().items()}


def by_hand(tied: bool, layer_map: tuple[int, ...], vocab: int) -> dict[str, torch.Tensor]:
    """The old tensors, cut and lengthened one by one."""
    old = {spec.name: full_value(OLD, spec) for spec in model_specs(1, tied=tied)}
    new = {}
    for spec in model_specs(1, tied=tied, depth=len(layer_map), vocab=vocab):
        number, _, local = spec.name.partition(".")
        depth = len(layer_map)
        source = {0: 0, depth + 3: 5, depth + 4: 6}.get(int(number))
        source = 2 + layer_map[int(number) - 2] if source is None else source
        value = old[f"{source}.{local}"]
        if len(value) != spec.shape[0]:
            value = torch.cat([value, full_value(RUN, spec)[VOCAB:]])[:vocab]
        new[spec.name] = value
    return new


# (pipe, data, model) that saved, and those that load; blocks; vocabulary
CASES = [
    ((1, 1, 2), [(2, 1, 1), (1, 2, 1)], False, (0, 0, 1, 1), 50),
    ((2, 1, 1), [(1, 1, 2), (1, 1, 1)], True, (0, 1, 0), 29),
    ((1, 1, 1), [(1, 2, 2)], True, (0, 1), 100),
]


@pytest.mark.parametrize(("saved_at", "loaded_at", "tied", "layer_map", "vocab"), CASES, ids=str)
def test_every_row_is_that_of_the_checkpoint_or_a_new_models(tmp_path, saved_at, loaded_at, tied, layer_map, vocab):
    run_distributed(save, torch.tensor(saved_at).prod().item(), str(tmp_path), saved_at, tied)
    growth, sizes = Growth(layer_map, True, RUN), {"depth": len(layer_map), "vocab": vocab}
    expected = by_hand(tied, layer_map, vocab)
    for layout in loaded_at:
        world = torch.tensor(layout).prod().item()
        found = {}
        for part in run_distributed(load, world, str(tmp_path), layout, tied, growth, sizes):
            found |= part
        for spec in model_specs(layout[2], tied=tied, **sizes):
            parts = [found[spec.name, rank] for rank in range(layout[2])]
            assert torch.equal(unshard(parts, spec), expected[spec.name]), (layout, spec.name)
            if spec.padded and layout[2] == 1:
                assert not parts[0][vocab:].any()


def test_another_size_without_the_flag_is_refused_and_named(tmp_path: Path) -> None:
    save(0, 1, str(tmp_path), (1, 1, 1), False)

    def grow(growth: Growth | None, **sizes: int) -> None:
        load(0, 1, str(tmp_path), (1, 1, 1), False, growth, sizes)

    resize = (
        rf"0\.word_embeddings\.weight is \[{VOCAB}, 16\], .*\[41, 16\].*init_from=\{{.*vocab: resize, optimizer: reset"
    )
    for growth in (None, Growth((0, 1), False, RUN)):
        with pytest.raises(UserError, match=resize):
            grow(growth, vocab=41)
    with pytest.raises(UserError, match=r"linear1\.weight is .*Check the model's config keys"):
        grow(Growth((0, 1), True, RUN), vocab=41, ffn=16)
    with pytest.raises(UserError, match=r"not in this model: 4\.attention"):
        grow(Growth((0, 0, 1), True, RUN))


CONFIG = {
    "num_layers": 2,
    "attention_config": ["local", "global"],
    "layer_mlps": ["dense", "moe"],
    "mlp_config": None,
    "hidden_size": 16,
}


def test_blocks_take_blocks_of_their_kind() -> None:
    def check(layer_map: list[int], attention: str, mlps: str = "", **more: int) -> list[str]:
        kinds, mlps = {"l": "local", "g": "global"}, mlps or attention.replace("l", "d").replace("g", "m")
        now = {
            **CONFIG,
            "num_layers": len(layer_map),
            "attention_config": tuple(kinds[one] for one in attention),
            "layer_mlps": tuple({"d": "dense", "m": "moe"}[one] for one in mlps),
            **more,
        }
        init = InitFrom.of({"path": "p", "optimizer": "reset", "layer_map": layer_map})
        return check_config(init.grown(CONFIG, now), now, path=Path("p"), load_optim=False)

    assert check([0, 1, 0, 1], "lglg") == check([0, 0, 1], "llg") == []
    for layer_map, kinds, numbers in (
        ([0, 1, 2, 1], "lglg", r"\[2\] .* has 2, .* 0 to 1"),
        ([1, 1, 1], "ggg", r"3 blocks takes \[0\] of the 2"),
        ([0, 0, 1], "lgg", "block 1 takes block 0, whose attention_config is 'local'.* 'global'"),
    ):
        with pytest.raises(UserError, match=rf"init_from\.layer_map: .*{numbers}"):
            check(layer_map, kinds)
    with pytest.raises(UserError, match="block 2 takes block 1, whose layer_mlps is 'moe'.* 'dense'"):
        check([0, 0, 1], "llg", "ddd")
    with pytest.raises(UserError, match="architecture: hidden_size: 16"):
        check([0, 0, 1], "llg", hidden_size=32)


def test_more_blocks_without_the_flag_are_refused_with_a_map() -> None:
    now = {**CONFIG, "num_layers": 5, "attention_config": ["local"] * 3 + ["global"] * 2, "layer_mlps": None}
    advice = r"init_from=\{path: p, layer_map: \[0, 0, 0, 1, 1\], optimizer: reset\}"
    with pytest.raises(UserError, match=rf"architecture: num_layers: 2 .*now 5(.|\n)*{advice}"):
        check_config(CONFIG, now, path=Path("p"))
    for other in ({"hidden_size": 32}, {"num_layers": 1}):
        with pytest.raises(UserError) as error:
            check_config(CONFIG, {**now, **other}, path=Path("p"))
        assert "layer_map" not in str(error.value)


def test_the_start_says_how_the_model_grows(tmp_path: Path) -> None:
    put(tmp_path / "base", 2)
    init = {"path": str(tmp_path / "base"), "optimizer": "reset", "vocab": "resize", "layer_map": [0, 0, 1]}
    message = decide(None, init_from=init).message
    assert re.search(r"vocabulary resized .*layer_map \[0, 0, 1\]", message)
    (tmp_path / "neox/global_step5").mkdir(parents=True)
    torch.save({"module": {}}, tmp_path / "neox/global_step5/mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="written by GPT-NeoX; vocab: resize and layer_map"):
        decide(None, init_from={**init, "path": str(tmp_path / "neox"), "data": "restart"})


REWARDS = Growth(None, False, RUN, new_head=True)


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "tied"), [((1, 1, 2), (2, 1, 1), False), ((1, 1, 1), (1, 2, 2), True)]
)
def test_a_language_models_checkpoint_lacks_only_the_head_of_rewards(tmp_path: Path, saved_at, loaded_at, tied) -> None:
    run_distributed(save, torch.tensor(saved_at).prod().item(), str(tmp_path), saved_at, tied)
    sizes = {"reward": True}
    found = {}
    for part in run_distributed(
        load, torch.tensor(loaded_at).prod().item(), str(tmp_path), loaded_at, tied, REWARDS, sizes
    ):
        found |= part
    for spec in model_specs(loaded_at[2], tied=tied, **sizes):
        whole = unshard([found[spec.name, rank] for rank in range(loaded_at[2])], spec)
        assert torch.equal(whole, full_value(RUN if spec.name == "6.rm_linear.weight" else OLD, spec)), spec.name


def test_nothing_else_may_be_missing_beside_the_head_of_rewards(tmp_path: Path) -> None:
    save(0, 1, str(tmp_path), (1, 1, 1), False)
    with pytest.raises(UserError, match=r"not in the checkpoint: 6\.rm_linear\.weight; .*finetune: true"):
        load(0, 1, str(tmp_path), (1, 1, 1), False, None, {"reward": True})
    with pytest.raises(UserError, match=r"not in the checkpoint: 4\.attention"):
        load(0, 1, str(tmp_path), (1, 1, 1), False, REWARDS, {"reward": True, "depth": 3})
    with pytest.raises(UserError, match=r"not in the checkpoint: 6\.final_linear\.weight"):
        (tmp_path / "rewards").mkdir()
        engine = engine_at(0, (1, 1, 1), OLD, False, reward=True)
        save_checkpoint(tmp_path / "rewards", 1, engine, engine.state, heads=HEADS, consumed=8, client={}, config={})
        load(0, 1, str(tmp_path / "rewards"), (1, 1, 1), False, REWARDS, {})


@pytest.mark.parametrize("form", ["pipe", "whole"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_of_gpt_neox_gets_a_head_of_rewards(tmp_path: Path, form: str, tied: bool) -> None:
    keys = {**NEOX, "no_weight_tying": not tied}
    _, theirs = hugging_face(resolved(**keys), "neox")
    checkpoint = open_checkpoint(write_neox(tmp_path / "global_step9", theirs, keys, tp=2, form=form))
    model = resolved(**keys, train_impl="rm").model
    specs = network_specs(model, NEOX_VOCAB)
    reader = open_reader(checkpoint, Opening(model, NEOX_VOCAB, new_head=True))
    grown = GrownReader(reader, REWARDS, {name: spec.shape for name, spec in specs.items()})
    assert grown.names() == sorted(specs, key=parameter_order)
    head = specs["6.rm_linear.weight"]
    assert torch.equal(grown.local_weight(head.name, head, 1, 2), initial_value(head, head.name, RUN)[:, 16:])
    same = specs["3.mlp.linear2.weight"]
    expected = theirs["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"].chunk(2, 1)[1]
    assert torch.equal(grown.local_weight(same.name, same, 1, 2), expected)
    with pytest.raises(UserError, match=r"lacks 6\.rm_linear\.weight.*finetune: true|missing layer_06"):
        open_reader(checkpoint, Opening(model, NEOX_VOCAB))


def test_a_run_goes_on_with_the_head_that_it_had() -> None:
    normal, rewards = ({**CONFIG, "output_head": head} for head in ("vocabulary", "reward"))
    check_config(normal, rewards, path=Path("p"), finetune=True, new_run=True, load_optim=False)
    for saved, now, options in (
        (normal, rewards, {}),
        (normal, rewards, {"new_run": True}),
        (rewards, normal, {"finetune": True, "new_run": True, "load_optim": False}),
    ):
        advice = "finetune: true" if now is rewards else "new weights"
        with pytest.raises(UserError, match=rf"output_head: .*(\n.*)*{advice}"):
            check_config(saved, now, path=Path("p"), **options)
