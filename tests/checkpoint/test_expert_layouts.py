"""Experts in a checkpoint: saved at any division of them, continued at any other; nobody holds more than needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.weights import save_weights
from tests.distributed import run_distributed
from tests.training.test_expert_parallel import MODELS
from tests.training.tiny import Layout, build, step_batch, whole_state

pytestmark = pytest.mark.cpu

BEFORE, AFTER = 3, 3


def train(
    rank: int, world: int, keys: dict[str, Any], layout: Layout, root: str, first: int, last: int, save: bool
) -> list[tuple[float, float]]:
    """Loss and gradient norm of steps first..last-1, from the checkpoint at `first` if that is not 0."""
    engine, args, _ = build(rank, keys, layout)
    heads = Heads.of(args.model)
    if first:
        load_checkpoint(open_checkpoint(f"{root}/global_step{first}"), engine, engine.state, heads=heads)
    curve = []
    for step in range(first, last):
        out = engine.train_batch(step_batch(step, args, engine.state), 1e-3 * (step + 1) / (BEFORE + AFTER))
        curve.append((float(out.loss), float(out.grad_norm)))
    if save:
        save_checkpoint(root, last, engine, engine.state, heads=heads, consumed=0, client={}, config=args.to_dict())
    return curve


def run(layout: Layout, keys: dict[str, Any], root: Path, first: int, last: int, save: bool = False) -> list[Any]:
    return run_distributed(train, layout.world, keys, layout, str(root), first, last, save, timeout=110)


ONE = Layout(micro=8)
SAVED_AT = [
    ("llama", Layout(dp=2, ep=2)),
    ("neox", Layout(pp=2, dp=2, ep=2)),
    pytest.param("llama", Layout(dp=2, tp=2, ep=2), marks=pytest.mark.full),
    pytest.param("neox", Layout(dp=4, ep=4, micro=1), marks=pytest.mark.full),
    ("neox", ONE),
]
CONTINUED_AT = [ONE, Layout(tp=2), Layout(pp=2, dp=2, ep=2), Layout(dp=2, tp=2, ep=2), Layout(dp=4, ep=4, micro=1)]


@pytest.mark.parametrize(("model", "layout"), SAVED_AT, ids=lambda x: getattr(x, "name", x))
def test_any_division_of_experts_continues_any_other(tmp_path: Path, model: str, layout: Layout) -> None:
    keys = MODELS[model]
    straight = run(ONE, keys, tmp_path, 0, BEFORE + AFTER)[0][BEFORE:]
    run(layout, keys, tmp_path, 0, BEFORE, save=True)
    for other in CONTINUED_AT:
        for curve in run(other, keys, tmp_path, BEFORE, BEFORE + AFTER):
            for (loss, norm), (expected, expected_norm) in zip(curve, straight, strict=True):
                assert loss == pytest.approx(expected, rel=1e-6), other.name
                assert norm == pytest.approx(expected_norm, rel=1e-5), other.name


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        ({}, Layout(dp=4, ep=2, micro=1)),
        ({"precision": "bfloat16"}, Layout(dp=4, ep=2, micro=1, zero=1)),
        ({"precision": "bfloat16"}, Layout(pp=2, dp=2, ep=2, zero=1)),
    ],
    ids=lambda x: getattr(x, "name", None) or x.get("precision", "fp32"),
)
def test_resume_at_the_same_layout_is_bit_exact(tmp_path: Path, keys: dict[str, Any], layout: Layout) -> None:
    keys = {**MODELS["llama"], **keys}
    straight = run(layout, keys, tmp_path, 0, BEFORE + AFTER)
    run(layout, keys, tmp_path, 0, BEFORE, save=True)
    resumed = run(layout, keys, tmp_path, BEFORE, BEFORE + AFTER)
    assert resumed == [curve[BEFORE:] for curve in straight]


def test_bfloat16_resumes_in_fp32_without_expert_parallelism(tmp_path: Path) -> None:
    """The fp32 masters of all experts are in the checkpoint, whoever had them."""
    keys = MODELS["neox"]
    half = {**keys, "precision": "bfloat16"}
    run(Layout(dp=2, ep=2, zero=1), half, tmp_path, 0, BEFORE, save=True)
    ours = run(ONE, keys, tmp_path, BEFORE, BEFORE + AFTER)[0]
    theirs = run(Layout(dp=2, tp=2, ep=2), keys, tmp_path, BEFORE, BEFORE + AFTER)[0]
    for (loss, norm), (other, other_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(other, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(open_checkpoint(folder))
    return {name: reader.weight(name) for name in reader.names()}


def test_the_files_are_the_same_whoever_held_the_experts(tmp_path: Path) -> None:
    files = {}
    for name, layout in (("one", ONE), ("four", Layout(dp=4, ep=4, micro=1)), ("eight", Layout(dp=4, tp=2, ep=4))):
        run(layout, MODELS["neox"], tmp_path / name, 0, 0, save=True)
        files[name] = stored(tmp_path / name / "global_step0")
    assert any("experts" in name for name in files["one"])
    for other in ("four", "eight"):
        assert files[other].keys() == files["one"].keys()
        assert all(torch.equal(files[other][name], value) for name, value in files["one"].items())
    layer = tmp_path / "{}" / "global_step0" / "layer_02-model_00-model_states.pt"
    assert Path(str(layer).format("one")).stat().st_size == Path(str(layer).format("four")).stat().st_size


def read_weights(rank: int, world: int, folder: str, keys: dict[str, Any], layout: Layout) -> dict[str, torch.Tensor]:
    """What every rank holds after loading weights alone, put together over the ranks that share experts."""
    engine, args, _ = build(rank, {**keys, "seed": 99}, layout)
    load_checkpoint(
        open_checkpoint(folder), engine, engine.state, heads=Heads.of(args.model), load_optim=False, load_rng=False
    )
    return {name: values["weight"] for name, values in whole_state(engine).items() if "experts" in name}


def test_weights_brought_from_elsewhere_are_dealt_out(tmp_path: Path) -> None:
    """`save_weights`, which imports write with, for another tensor-parallel size."""
    run(ONE, MODELS["neox"], tmp_path / "one", 0, 0, save=True)
    reader = CheckpointReader(open_checkpoint(tmp_path / "one" / "global_step0"))
    folder = save_weights(
        tmp_path / "two",
        5,
        [(reader.spec(name), reader.weight(name)) for name in reader.names()],
        tp_size=4,
        heads=reader.heads,
        config=reader.manifest.config,
        dtype=torch.float32,
    )
    for found in run_distributed(read_weights, 4, str(folder), MODELS["neox"], Layout(dp=4, ep=4, micro=1)):
        assert len(found) == 8
        assert all(torch.equal(value, reader.weight(name)) for name, value in found.items())
