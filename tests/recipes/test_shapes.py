"""Networks of every family at any size, made of its shipped recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.errors import UserError
from megatron.recipes.scaling import parameter_groups, plan_training
from megatron.recipes.shapes import FAMILIES, read_recipe, scaled
from tests.documented import ROOT
from tests.warm_python import WarmPython

pytestmark = pytest.mark.cpu

CONFIGS = ROOT / "configs"
SMALL = ["llama/60M.yml", "gemma3/60M.yml", "mamba2/60M.yml"]  # the others are of the same parts


def test_llama_7b_follows_from_its_size() -> None:
    """Touvron et al. 2023: 6,738,415,616 parameters in 32 layers of 4096, 11008 and 2048 or more tokens of context."""
    keys = scaled(read_recipe("llama", CONFIGS), 6_738_415_616, 32_000).keys
    assert [keys[name] for name in ("num_layers", "hidden_size", "intermediate_size")] == [32, 4096, 11008]


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: str) -> None:
    base = read_recipe(family, CONFIGS)
    for size in (10e6, 125e6, 3e9):
        shape = scaled(base, int(size), 8192)
        assert 0.8 * size < shape.count.total < 1.3 * size
        heads = shape.keys.get("num_attention_heads")
        assert heads is None or heads % shape.keys.get("num_kv_heads", heads) == 0
        resized = {"num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "intermediate_size"}
        resized |= {"seq_length", "max_position_embeddings", "sliding_window_width"}
        assert {k: v for k, v in shape.keys.items() if k not in resized} == {
            k: v for k, v in base.items() if k not in resized
        }
    with pytest.raises(UserError, match=r"--size: .*128,000 tokens has [\d,]+ parameters"):
        scaled(base, 1_000_000, 128_000)


# With 32,000 tokens. LLaMA's as published: 2 x 32000 x 512 + 8 x (4 x 512^2 + 3 x 512 x 1376 + 2 x 512) + 512.
COUNTS = {"llama": 58_073_600, "qwen3": 59_813_504, "gemma3": 62_025_216, "olmo3": 58_081_792, "mamba2": 57_667_200}


@pytest.mark.parametrize(("family", "parameters"), COUNTS.items())
def test_a_recipe_is_what_its_size_gives(family: str, parameters: int) -> None:
    """The shipped 60M has its own shape, and rate, batch, decay and length of the rules."""
    base, recipe = read_recipe(family, CONFIGS), yaml.safe_load((CONFIGS / FAMILIES[family]).read_text())
    shape = scaled(base, parameters, 32_000)
    assert shape.keys == base and shape.count.total == parameters
    plan = plan_training(parameters, shape.outside_embeddings, 1024, 20 * parameters, 20 * parameters)
    assert recipe["optimizer"]["params"]["lr"] == pytest.approx(plan.rate, rel=0.05)
    assert recipe["weight_decay"] == pytest.approx(plan.decay, rel=0.05)
    assert (recipe["train_batch_size"], recipe["train_iters"]) == (plan.batch, plan.steps)
    assert recipe["warmup"] == f"{plan.warmup} steps"
    assert recipe.get("parameter_groups", []) == parameter_groups(base)
    assert recipe["optimizer"]["type"] == ("AdamW" if family == "mamba2" else "muon")


def test_the_small_recipes_train(tmp_path: Path, warm_python: WarmPython) -> None:
    """Two steps, shrunk."""
    for name in SMALL:
        (tmp_path / "yaml" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "yaml" / name).write_text((CONFIGS / name).read_text())
    (tmp_path / "yaml/local_setup.yml").write_text((CONFIGS / "local_setup.yml").read_text())
    done = warm_python.run(f"python {ROOT}/tools/compat.py yaml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 files: 4 load, 4 train two steps" in done.stdout
