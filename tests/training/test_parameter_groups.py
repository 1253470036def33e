"""`parameter_groups` through the engines: the update of each group against torch's AdamW in fp64, the same curve at
other layouts and ZeRO stages, and what checkpoints keep of frozen parameters."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.save import save_checkpoint
from megatron.errors import UserError
from tests.distributed import run_distributed
from tests.distributed.client import RankFailure
from tests.training.tiny import LLAMA, Layout, build, step_batch, train, whole_state

pytestmark = pytest.mark.cpu

FREEZE = {"match": ["0.word_embeddings.weight", "2.mlp.*"], "freeze": True}
RULES = [
    FREEZE,
    {"match": "*.bias", "weight_decay": 0.3},
    {"match": "3.*", "lr_mult": 0.5},
    {"match": "3.mlp.*", "lr_mult": 2, "weight_decay": 0.0},
]
KEYS: dict[str, Any] = {**LLAMA, "parameter_groups": RULES, "no_weight_tying": True}
STEPS = 4


def _rule(name: str) -> tuple[float, float] | None:
    """(weight decay, learning rate multiplier) by hand; None: frozen."""
    if name.startswith(("0.", "2.mlp.")):
        return None
    if name.startswith("3.mlp.") and "bias" not in name:
        return 0.0, 2.0
    decay = 0.3 if name.endswith(".bias") else 0.1 if "norm" not in name else 0.0
    decay = 0.0 if name.startswith("3.mlp.") else decay
    return decay, 2.0 if name.startswith("3.mlp.") else 0.5 if name.startswith("3.") else 1.0


def _beside_torch(rank: int, world: int) -> dict[str, float]:
    """Largest difference of a weight after some steps from torch's AdamW in fp64 on the same gradients, by name."""
    engine, args, lr = build(rank, {**KEYS, "gradient_clipping": 0.0}, Layout())
    theirs = {name: torch.nn.Parameter(p.detach().double()) for name, p in engine.params().items()}
    rules = {name: rule for name in theirs if (rule := _rule(name)) is not None}
    groups = [{"params": [theirs[n]], "weight_decay": decay, "mult": mult} for n, (decay, mult) in rules.items()]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        found: dict[str, torch.Tensor] = {}
        engine.before_update = lambda found=found: found.update({n: g.clone() for n, g in engine.grads().items()})
        engine.train_batch(step_batch(step, args, engine.state), lr(step))
        assert found.keys() == rules.keys(), "a frozen parameter has a gradient"
        for name, gradient in found.items():
            theirs[name].grad = gradient.double()
        for group in reference.param_groups:
            group["lr"] = lr(step) * group["mult"]
        reference.step()
    return {name: float((p.detach() - theirs[name]).abs().max()) for name, p in engine.params().items()}


def test_each_group_moves_as_its_rules_say() -> None:
    (differences,) = run_distributed(_beside_torch, 1)
    assert all(difference == 0 for name, difference in differences.items() if _rule(name) is None)
    assert max(differences.values()) < 5e-7  # the last bit of weights around 1


@functools.cache
def _alone(tied: bool) -> dict[str, list[float]]:
    return run_distributed(train, 1, {**KEYS, "no_weight_tying": not tied}, Layout(), STEPS)[0]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (Layout(pp=2, tp=2), True),
        (Layout(dp=2, zero=1, micro=1), False),
        (Layout(dp=2, zero=3), False),
        (Layout(dp=2, engine="native"), True),
    ],
    ids=lambda layout: getattr(layout, "name", layout),
)
def test_the_curve_is_the_same_at_every_layout(layout: Layout, tied: bool) -> None:
    keys = {**KEYS, "no_weight_tying": not tied}
    alone = _alone(tied)
    for curve in run_distributed(train, layout.world, keys, layout, STEPS, timeout=150):
        for name in alone:
            assert curve[name] == pytest.approx(alone[name], rel=1e-5), name


def test_bf16_stages_train_with_a_frozen_tied_weight() -> None:
    """DeepSpeed adds up gradients of tied weights over the stages, also where there is none."""
    keys = {**KEYS, "no_weight_tying": False, "precision": "bfloat16"}
    alone = run_distributed(train, 1, keys, Layout(), STEPS)[0]
    for curve in run_distributed(train, 2, keys, Layout(pp=2), STEPS):
        assert curve["loss"] == pytest.approx(alone["loss"], rel=1e-3)


HEADS = Heads(LLAMA["num_attention_heads"], LLAMA["num_kv_heads"])  # type: ignore[arg-type]


def _step(built: tuple[Any, Any, Any], steps: range) -> list[float]:
    engine, args, lr = built
    return [float(engine.train_batch(step_batch(step, args, engine.state), lr(step)).loss) for step in steps]


def _save(rank: int, world: int, keys: dict[str, Any], layout: Layout, root: str) -> tuple[list[float], Any]:
    built = build(rank, keys, layout)
    _step(built, range(2))
    save_checkpoint(root, 2, built[0], built[0].state, heads=HEADS, consumed=16, client={}, config={})
    state = whole_state(built[0])
    return _step(built, range(2, 4)), {name: set(values) for name, values in state.items()}


def _load(rank: int, world: int, keys: dict[str, Any], layout: Layout, root: str) -> tuple[list[float], Any, list[str]]:
    built = build(rank, keys, layout)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("deepy.checkpoint.load")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    load_checkpoint(open_checkpoint(f"{root}/global_step2"), built[0], built[0].state, heads=HEADS)
    logger.removeHandler(handler)
    state = {name: {k: float(v.abs().max()) for k, v in vs.items()} for name, vs in whole_state(built[0]).items()}
    return _step(built, range(2, 4)), state, told


def test_frozen_parameters_are_saved_without_state_and_thaw(tmp_path: Path) -> None:
    curve, kept = run_distributed(_save, 2, KEYS, Layout(dp=2, zero=3), str(tmp_path))[0]
    for name, keys in kept.items():
        assert keys == ({"weight"} if _rule(name) is None else {"weight", "exp_avg", "exp_avg_sq"}), name
    again, _, told = run_distributed(_load, 2, KEYS, Layout(tp=2), str(tmp_path))[0]
    assert again == pytest.approx(curve, rel=1e-5) and not any("thawed" in line for line in told)
    thawed = {**KEYS, "parameter_groups": [{**FREEZE, "freeze": False}, {"match": "3.mlp.*", "freeze": True}]}
    for layout in (Layout(pp=2), Layout(dp=2, engine="native")):
        _, state, told = run_distributed(_load, 2, thawed, layout, str(tmp_path))[0]
        for name, values in state.items():
            if name.startswith("3.mlp."):
                assert set(values) == {"weight"}
            else:
                assert (values["exp_avg"] == 0) == (_rule(name) is None), name
        (line,) = [line for line in told if "thawed" in line]
        assert "0.word_embeddings.weight, 2.mlp." in line


def test_a_pattern_without_a_parameter_names_those_near_it() -> None:
    keys = {**KEYS, "parameter_groups": [{"match": "*.atention.dense.weight", "freeze": True}]}
    with pytest.raises((UserError, RankFailure), match=r"\*\.atention\.dense\.weight.*2\.attention\.dense\.weight"):
        run_distributed(train, 2, keys, Layout(pp=2), 1)
