"""The mean of checkpoints, against fp64 sums of what the engines hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.find import list_checkpoints, open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.weights import save_weights
from megatron.convert.average import average
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.checkpoint.fake_engine import HEADS, FakeEngine
from tests.distributed import run_distributed
from tests.inference.models import ALONE, make_checkpoint, stage_of
from tests.training.tiny import LLAMA, Layout

pytestmark = pytest.mark.cpu


def save(root: Path | str, step: int, engine: FakeEngine, **options: Any) -> Path:
    for _ in range(step - engine.steps):
        engine.step()
    content = {"heads": HEADS, "consumed": step, "client": {}, "config": {"run": step}}
    return save_checkpoint(root, step, engine, engine.state, **content, **options)


def save_of_rank(rank: int, world: int, root: str) -> None:
    state = ParallelState.build(Topology({"pipe": 1, "data": 1, "model": 2}), rank, "cpu")
    save(root, 3, FakeEngine(state, seed=5, dtype=torch.bfloat16))


def test_it_is_the_mean_of_the_masters_in_fp64_whatever_the_layouts(tmp_path: Path) -> None:
    """Step 2 keeps its masters, step 7 has none, step 3 is of two tensor-parallel ranks and of another seed."""
    one, two = (FakeEngine(ParallelState.single(), seed, dtype=torch.bfloat16) for seed in (1, 2))
    total = {name: torch.zeros(spec.shape, dtype=torch.float64) for name, spec in one.specs.items()}
    folders = [save(tmp_path / "a", 2, one)]
    for name, master in one.masters.items():
        total[name] += master.detach()[: total[name].shape[0]]
    folders.append(save(tmp_path / "b", 7, two, save_optim=False))
    for name, weight in two.params().items():
        total[name] += weight.detach()[: total[name].shape[0]]
    run_distributed(save_of_rank, 2, str(tmp_path / "c"))
    folders.append(tmp_path / "c" / "global_step3")
    three = FakeEngine(ParallelState.single(), seed=5, dtype=torch.bfloat16)
    for _ in range(3):
        three.step()
    for name, master in three.masters.items():
        total[name] += master.detach()[: total[name].shape[0]]

    made = average([str(folder) for folder in folders], tmp_path / "out", precision="fp32")
    opened = open_checkpoint(made)
    opened.check_files(checksums=True)
    assert (made, opened.manifest.step, opened.manifest.config) == (tmp_path / "out" / "global_step7", 7, {"run": 7})
    reader = CheckpointReader(opened)
    for name, expected in total.items():
        mean = (expected / 3).float()
        assert reader.dtype(name) == torch.float32 and torch.allclose(reader.weight(name), mean, rtol=1e-6, atol=1e-8)
    rounded = CheckpointReader(open_checkpoint(average([str(f) for f in folders], tmp_path / "half")))
    assert all(torch.equal(rounded.weight(name), reader.weight(name).bfloat16()) for name in total)


def test_what_cannot_be_averaged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(ParallelState.single(), 1)
    one, two = str(save(tmp_path / "a", 1, engine)), str(save(tmp_path / "a", 2, engine))
    wider = str(save(tmp_path / "b", 2, FakeEngine(ParallelState.single(), 1, ffn=20)))
    for sources, output, message in (
        ([one], "out", "two or more"),
        ([one, one], "out", "each once"),
        ([one, two], "a", "--output_dir: .*choose another"),
        ([one, wider], "out", r"2.mlp.linear1.weight has shape \[40, 16\] and \[24, 16\]"),
        ([one, str(tmp_path / "a" / "global_step9")], "out", "CHECKPOINT"),
    ):
        with pytest.raises(UserError, match=message):
            average(sources, tmp_path / output)
    assert not (tmp_path / "out").exists() and list_checkpoints(tmp_path / "a").steps == (1, 2)
    average([one, two], tmp_path / "out")
    with pytest.raises(UserError, match="--overwrite"):
        average([one, two], tmp_path / "out")
    average([one, two], tmp_path / "out", overwrite=True)


def test_adapters_are_merged_before_the_mean(tmp_path: Path) -> None:
    """W + the mean of s·B·A, not that of the means of B and A; generation loads it as a model without adapters."""
    keys = {**LLAMA, "lora_r": 3, "lora_alpha": 6.0, "lora_save_base": True}
    model = CheckpointReader(open_checkpoint(make_checkpoint(tmp_path / "model", keys)))
    of_model: dict[str, Any] = {"tp_size": 1, "heads": model.heads, "config": model.manifest.config}
    folders = []
    for seed in (1, 2):
        random = torch.Generator().manual_seed(seed)
        weights = [(model.spec(name), torch.randn(model.entry(name).shape, generator=random)) for name in model.names()]
        folders.append(save_weights(tmp_path / str(seed), 1, weights, dtype=torch.float32, **of_model))
    readers = [CheckpointReader(open_checkpoint(folder)) for folder in folders]
    made = average([str(folder) for folder in folders], tmp_path / "out")
    mean = CheckpointReader(open_checkpoint(made))
    adapted = [name.removesuffix(".lora.A") for name in readers[0].names() if name.endswith(".lora.A")]
    assert adapted and readers[0].weight(f"{adapted[0]}.lora.B").any()
    assert not any(".lora." in name for name in mean.names()) and mean.manifest.config["lora_r"] is None
    for layer in adapted:
        expected = torch.zeros(readers[0].weight(f"{layer}.weight").shape, dtype=torch.float64)
        for reader in readers:
            w, a, b = (reader.weight(f"{layer}.{part}").double() for part in ("weight", "lora.A", "lora.B"))
            expected += (w + 2.0 * b @ a) / 2
        torch.testing.assert_close(mean.weight(f"{layer}.weight"), expected.float(), rtol=1e-5, atol=1e-5)
    assert stage_of(made, LLAMA, ALONE).layers


@pytest.mark.slow
def test_generation_loads_it(tmp_path: Path) -> None:
    """The mean of a model and of its copy at another layout is the model."""
    one = make_checkpoint(tmp_path / "a", LLAMA)
    two = make_checkpoint(tmp_path / "b", LLAMA, Layout(tp=2))
    made = average([str(one), str(two)], tmp_path / "out")
    expected, found = stage_of(one, LLAMA, ALONE), stage_of(made, LLAMA, ALONE)
    weights = [dict(enumerate(p.detach() for layer in s.layers for p in layer.parameters())) for s in (expected, found)]
    assert len(weights[0]) > 10 and all(torch.equal(weights[0][i], weights[1][i]) for i in weights[0])
