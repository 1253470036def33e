"""The optimizer state of GPT-NeoX's checkpoints, read from files that DeepSpeed itself wrote."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import neox_reader
from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.neox_optimizer import NeoXOptimizer
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.errors import UserError
from megatron.mpu.sharding import ParamSpec, shard
from tests.checkpoint import neox_engine
from tests.checkpoint.neox_files import write_neox
from tests.checkpoint.starts import decide
from tests.convert.helpers import NEOX, VOCAB, hugging_face, resolved, specs_of
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

STEPS = 3
ROW_BIASES = ("attention.dense.bias", "mlp.linear2.bias")
CASES = {
    "zero 1, dp 2": ("zero 1", 1, {}),
    "zero 2, dp 2": ("zero 2", 1, {}),
    "bf16, dp 2": ("bf16 zero 1", 1, {}),
    "zero 0, tp 2": ("zero 0", 2, {}),
    "zero 1, tp 2, parallel": ("zero 1", 2, {"gpt_j_residual": True}),
    "tied": ("zero 0", 1, {"no_weight_tying": False}),
}


def shards_of(folder: Path, keys: dict[str, Any], tp: int) -> list[dict[str, torch.Tensor]]:
    """[tensor-parallel rank] -> {name: weights}, as GPT-NeoX cuts a random model."""
    write_neox(folder, hugging_face(resolved(**keys), "neox")[1], keys, tp=tp, form="whole")
    modules = (torch.load(path, weights_only=False)["module"] for path in sorted(folder.glob("mp_rank_*")))
    return [{name.removeprefix("sequential."): t for name, t in module.items()} for module in modules]


def whole_file(folder: Path, shards: list[dict[str, torch.Tensor]]) -> Path:
    """A folder whose weights are these."""
    folder.mkdir()
    for rank, one in enumerate(shards):
        module = {f"sequential.{name}": tensor for name, tensor in one.items()}
        torch.save({"module": module}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def written(folder: Path, kind: str, tp: int, keys: dict[str, Any]) -> list[dict[str, dict[str, torch.Tensor]]]:
    """DeepSpeed's checkpoint in `folder`; what it kept, by tensor-parallel rank."""
    shards, state = shards_of(folder.parent / "weights", keys, tp), {"args": {"num_layers": keys["num_layers"]}}
    world = 1 if kind == "zero 0" and tp == 1 else 2
    return list(dict(run_distributed(neox_engine.save, world, folder, shards, kind, STEPS, state)).values())


def check_reads(reader: NeoXReader, specs: Mapping[str, ParamSpec], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard is read once, whatever is asked of its parameter, and copied only where two parts hold it."""
    reads: Counter[Any] = Counter()
    copied: set[Any] = set()

    class Counted(NeoXOptimizer):
        def read(self, place: Any, tp_rank: int) -> dict[str, torch.Tensor]:
            reads[place, tp_rank] += 1
            found = super().read(place, tp_rank)
            if any(value.untyped_storage().nbytes() == value.nbytes for value in found.values()):
                copied.add(place)
            return found

    monkeypatch.setattr(neox_reader, "NeoXOptimizer", Counted)
    for spec in specs.values():
        reader.optimizer_keys(spec.name)
        for rank in range(2):
            reader.local_optimizer(spec.name, spec, rank, 2)
    assert set(reads.values()) == {1}
    assert kind == "zero 0" or len(copied) <= 2, copied  # one flat vector per group, cut once


@pytest.mark.parametrize(("kind", "tp", "more"), CASES.values(), ids=CASES)
def test_moments_and_masters_are_deepspeeds_at_any_layout(tmp_path, kind, tp, more, monkeypatch):
    keys, folder = {**NEOX, **more}, tmp_path / "global_step3"
    kept = written(folder, kind, tp, keys)
    args = resolved(**keys)
    reader = NeoXReader(decide(None, folder).checkpoint, args.model, VOCAB)
    assert reader.optimizer_keys("2.mlp.linear1.weight") == ["exp_avg", "exp_avg_sq", "weight"]
    for key in ("exp_avg", "exp_avg_sq", "weight"):
        shards = [{name: values[key] for name, values in rank.items()} for rank in kept]
        for name in [name for name in shards[0] if name.endswith(ROW_BIASES)] if key != "weight" else []:
            for one in shards[1:]:  # each copy of a bias has the moments of the effective one, which is their sum
                assert torch.equal(one[name], shards[0][name])
                one[name] = torch.zeros_like(one[name]) if more.get("gpt_j_residual") else one[name]
        # The weights of such files are those of transformers (test_neox_reader).
        like_weights = NeoXReader(open_checkpoint(whole_file(tmp_path / key, shards)), args.model, VOCAB)
        for spec in specs_of(args, 2).values():
            expected = like_weights.weight(spec.name)
            assert expected.abs().max() > 0
            for rank in range(2):
                found = reader.local_optimizer(spec.name, spec, rank, 2)[key]
                assert torch.equal(found, shard(expected, spec, rank, 2)), (spec.name, key)
    check_reads(NeoXReader(decide(None, folder).checkpoint, args.model, VOCAB), specs_of(args, 2), kind, monkeypatch)
    state = reader.state()
    assert state["scalars"]["optimizer_steps"] == STEPS and state["scalars"]["skipped_steps"] == 0
    assert state["client"] == {"step": STEPS, "consumed": STEPS * neox_engine.BATCH, "callbacks": {}}


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero") / "global_step3"
    written(folder, "zero 1", 1, NEOX)
    return folder


def part(number: int) -> str:
    return f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt"


def cut_off(folder: Path) -> None:
    whole = (folder / part(1)).read_bytes()
    (folder / part(1)).write_bytes(whole[: len(whole) // 2])


def rewrite(folder: Path, name: str, change: Any) -> None:
    content = torch.load(folder / name, weights_only=False)
    change(content)
    torch.save(content, folder / name)


def shorten(content: dict[str, Any]) -> None:
    state = content["optimizer_state_dict"]
    state["single_partition_of_fp32_groups"] = [one[:-9].clone() for one in state["single_partition_of_fp32_groups"]]


def rename(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"] = {"local_sub_partitions_of_fp32_groups": [], "ds_version": "0.3.15"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / part(1)).unlink(), rf"missing {part(1)} .*by 2 data-parallel.*no_load_optim"),
        (lambda folder: shutil.copy(folder / part(1), folder / part(2)), rf"{part(2)} cannot belong"),
        (cut_off, rf"{part(1)} cannot be read"),
        (lambda folder: rewrite(folder, part(1), shorten), rf"{part(1)}: weight of parameter group \d .*too few"),
        (lambda folder: rewrite(folder, part(0), rename), r"DeepSpeed 0.3.15; .*local_sub_partitions.*no_load_optim"),
    ],
    ids=["missing", "one more", "cut off", "too short", "another form"],
)
def test_a_file_that_cannot_be_used_is_named(partitioned, tmp_path, damage, message):
    folder = tmp_path / "global_step3"
    shutil.copytree(partitioned, folder)
    damage(folder)
    reader = NeoXReader(decide(None, folder).checkpoint, resolved(**NEOX).model, VOCAB)
    with pytest.raises(UserError, match=message):
        for name in reader.names():
            reader.optimizer_keys(name)


def test_a_run_goes_on_among_the_files_of_theirs(partitioned):
    """`save` and `load` are one folder in most of GPT-NeoX's configs."""
    start = decide(partitioned.parent, partitioned.parent)
    assert (start.kind, start.step, start.load_optim, start.load_data) == ("load", 3, True, True)
    assert "GPT-NeoX's run" in start.message and f"{STEPS * neox_engine.BATCH} samples" in start.message
