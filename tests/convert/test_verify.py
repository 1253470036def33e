"""verify.py and inspect_checkpoints.py: any kind of model against any other, in any position."""

from __future__ import annotations

import code
import os
import re
import weakref

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert import inspect
from megatron.convert.inspect import describe_folder
from megatron.convert.pairs import Place
from megatron.convert.published.folder import HuggingFaceFolder
from megatron.convert.published.reader import HuggingFaceReader
from megatron.convert.verify import verify
from tests.checkpoint.neox_files import write_neox
from tests.convert.families.cases import FAMILY_CASES
from tests.convert.helpers import LLAMA, NEOX, full_tensors, hugging_face, resolved, write_checkpoint
from tests.convert.test_faces import call  # noqa: F401 (a fixture)

pytestmark = pytest.mark.cpu

VERIFY, INSPECT = "tools/ckpts/verify.py", "tools/ckpts/inspect_checkpoints.py"
KEYS = {**NEOX, "gpt_j_residual": True}


@pytest.fixture
def models(tmp_path):
    """One model as `hf`, `hf16`, `ours` (2 ranks), `neox` (2 ranks, no config); its tensors, ours and theirs."""
    args = resolved(**KEYS)
    model, theirs = hugging_face(args, "neox")
    model.save_pretrained(tmp_path / "hf")
    model.bfloat16().save_pretrained(tmp_path / "hf16")
    ours = full_tensors(args, "neox", theirs)
    write_checkpoint(tmp_path / "ours", args, ours, tp=2)
    write_neox(tmp_path / "neox" / "global_step9", theirs, KEYS, tp=2, names="te")
    return args, ours, theirs


@pytest.mark.parametrize(
    ("one", "other"),
    [("ours", "hf"), ("hf", "ours"), ("neox", "hf"), ("hf", "neox"), ("ours", "neox"), ("neox", "ours")]
    + [("hf", "hf"), ("hf", "hf16"), ("ours", "hf16"), ("ours", "ours")],
)
def test_any_pair_of_one_model_agrees(tmp_path, models, call, one, other):  # noqa: F811
    code_, out, error = call(VERIFY, tmp_path / one, tmp_path / other)
    assert code_ == 0 and "largest logit difference in fp32" in out, error
    assert float(out.split("fp32: ")[1].split()[0]) < 1e-5


@pytest.mark.parametrize("kind", ["ours", "hf"])
def test_the_first_block_that_drifts_is_named(tmp_path, models, call, kind):  # noqa: F811
    args, ours, theirs = models
    if kind == "ours":
        name = "3.mlp.linear2.weight"
        write_checkpoint(tmp_path / "changed", args, {**ours, name: ours[name] * 1.5})
    else:
        (tmp_path / "changed").mkdir()
        (tmp_path / "changed/config.json").write_bytes((tmp_path / "hf/config.json").read_bytes())
        name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
        save_file({**theirs, name: theirs[name] * 1.5}, tmp_path / "changed/model.safetensors", {"format": "pt"})
    for pair in (("changed", "hf"), ("ours", "changed"), ("changed", "neox")):
        code_, out, error = call(VERIFY, *(tmp_path / name for name in pair))
        assert code_ == 2 and "first after block 1" in out, error


def test_what_cannot_be_compared_is_refused(tmp_path, models, call, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tests.convert.helpers.VOCAB", 71)
    model, _ = hugging_face(resolved(**KEYS), "neox")
    model.save_pretrained(tmp_path / "larger")
    code_, _, error = call(VERIFY, tmp_path / "ours", tmp_path / "larger")
    assert code_ == 2 and "has 67 tokens" in error and "has 71" in error
    code_, _, error = call(VERIFY, tmp_path / "neox", tmp_path / "neox")
    assert code_ == 2 and "keeps no config; give --config_file" in error
    code_, _, error = call(VERIFY, tmp_path / "nowhere", tmp_path / "hf")
    assert code_ == 2 and error.startswith("error: A:") and "nowhere" in error
    code_, _, error = call(VERIFY, tmp_path / "hf", "EleutherAI/pythia-0m", "--revision", "step0")
    assert code_ == 2 and error.startswith("error: B: cannot fetch EleutherAI/pythia-0m at revision step0")


def test_ours_of_two_steps(tmp_path, models, call):  # noqa: F811
    run = {**KEYS, "tokenizer_type": "CharLevelTokenizer", "vocab_size": 67, "train_batch_size": 2}
    (tmp_path / "run.yml").write_text(yaml.safe_dump({**run, "model_parallel_size": 2}))
    code_, _, error = call(VERIFY, tmp_path / "neox", tmp_path / "ours", "--config_file", tmp_path / "run.yml")
    assert code_ == 0, error
    code_, _, error = call(VERIFY, tmp_path / "ours", tmp_path / "hf", "--iteration", 5)
    assert code_ == 2 and re.search(r"iteration 5 in .*\[7\]", error)


@pytest.mark.parametrize(("one", "other"), [("ours", "hf"), ("hf", "neox"), ("neox", "ours"), ("hf", "hf")])
def test_parameters_of_any_pair_are_compared(tmp_path, models, call, one, other):  # noqa: F811
    code_, out, error = call(INSPECT, tmp_path / one, "--diff", tmp_path / other)
    _, _, *differing, last = out.splitlines()
    if "neox" not in (one, other):
        assert code_ == 0 and last == f"{len(models[1])} parameters are equal" and not differing, error
        return
    # A row-parallel bias is a sum over two ranks there, of a third and two thirds: the last digit may differ.
    assert code_ == 0 and last.startswith(f"{len(models[1]) - len(differing)} parameters are equal"), error
    for line in differing:
        assert line.split()[0].endswith(("dense.bias", "linear2.bias"))
        assert float(line.split("largest difference ")[1].split(",")[0]) < 1e-7


def test_what_differs_is_measured(tmp_path, models, call):  # noqa: F811
    args, ours, theirs = models
    name = "2.mlp.linear1.weight"
    changed = {**ours, name: ours[name] + 0.25 * (torch.arange(ours[name].numel()).view_as(ours[name]) == 5)}
    write_checkpoint(tmp_path / "changed", args, changed, tp=2)
    code_, out, _ = call(INSPECT, "-c", f"{tmp_path}/changed,{tmp_path}/hf", "-d")
    assert code_ == 0
    lines = [line for line in out.splitlines() if line.startswith("2.")]
    norm = float(theirs["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"].norm())
    assert len(lines) == 1 and lines[0].startswith(name) and "largest difference 0.25" in lines[0]
    assert float(lines[0].rsplit(" ", 1)[1]) == pytest.approx(0.25 / norm, rel=0.05)
    assert re.fullmatch(rf"{len(ours) - 1} .*equal, 1 differ, 0 .*alone", out.splitlines()[-1])
    code_, out, _ = call(INSPECT, "-c", f"{tmp_path}/changed,{tmp_path}/hf")
    assert out.count(" equal\n") == len(ours) - 1
    code_, out, _ = call(INSPECT, tmp_path / "hf16", "-d", tmp_path / "ours")
    assert code_ == 0 and "bfloat16 in a, float32 in b" in out
    args = resolved(**{**KEYS, "num_layers": 3})
    write_checkpoint(tmp_path / "deeper", args, full_tensors(args, "neox", hugging_face(args, "neox")[1]))
    code_, out, _ = call(INSPECT, tmp_path / "deeper", "--diff", tmp_path / "ours")
    assert code_ == 0 and "4.attention.dense.weight" in out and "only in a" in out
    code_, _, error = call(INSPECT, "-c", tmp_path / "ours")
    assert code_ == 2 and "-c: expected two folders" in error


def test_the_tree_counts_modules_and_shows_equal_layers_once(tmp_path, models, call, monkeypatch):  # noqa: F811
    def read(*_):
        raise AssertionError("a tree needs no values")

    monkeypatch.setattr(CheckpointReader, "weight", read)
    monkeypatch.setattr(HuggingFaceFolder, "tensor", read)
    code_, out, error = call(INSPECT, "--checkpoint-path", tmp_path / "ours", "--tree")
    assert code_ == 0, error
    lines = [" ".join(line.split()) for line in out.splitlines()]
    layer = sum(t.numel() for name, t in models[1].items() if name.startswith("2."))
    assert f"2..3: 2 alike, each {layer:,}" in lines and "weight [96, 32] float32 3,072" in lines
    code_, out, _ = call(INSPECT, tmp_path / "hf", "--tree")
    assert code_ == 0 and "0..1: 2 alike, each" in out and "dense_h_to_4h" in out


def test_a_hugging_face_folder_is_described_whatever_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "rocket", "architectures": ["RocketForCausalLM"]}')
    save_file({"engine.weight": torch.full((3, 4), 2.0)}, tmp_path / "model.safetensors")
    lines = list(describe_folder(HuggingFaceFolder(tmp_path)))
    assert "RocketForCausalLM" in lines[0] and lines[1].startswith("12 parameters")
    assert lines[2].split() == ["engine.weight", "[3,", "4]", "float32", "model.safetensors", "norm", "6.9282"]


def test_attributes_are_shown_without_running_anything(tmp_path, call):  # noqa: F811
    _, theirs = hugging_face(resolved(**KEYS), "neox")
    folder = write_neox(tmp_path / "neox" / "global_step9", theirs, KEYS, bomb=tmp_path / "exploded")
    code_, out, error = call(INSPECT, folder, "--attributes", "args/num_layers", "iteration", "lr_scheduler/start_lr")
    assert code_ == 0, error
    assert [line.strip() for line in out.splitlines()] == [
        "mp_rank_00_model_states.pt:",
        "args/num_layers: 2",
        "iteration: 9",
        "lr_scheduler/start_lr: 0.001",
    ]
    code_, out, error = call(INSPECT, folder / "layer_00-model_00-model_states.pt")
    assert code_ == 0 and "word_embeddings.weight: [72, 32] float32, 9,216 bytes" in out, error
    code_, _, error = call(INSPECT, folder, "--attributes", "iterations")
    assert code_ == 2 and "no file of" in error and "Did you mean 'iteration'?" in error
    assert not (tmp_path / "exploded").exists()


def test_a_prompt_with_the_checkpoint(tmp_path, models, call, monkeypatch):  # noqa: F811
    seen = {}
    monkeypatch.setattr(code, "interact", lambda banner, local: seen.update(local))
    assert call(INSPECT, tmp_path / "ours", "-i")[0] == 0
    assert seen["checkpoint"].names()[0] == "0.word_embeddings.weight"


def test_one_parameter_is_in_memory_at_a_time(tmp_path, models, monkeypatch):
    alive, peak = set(), []
    original = CheckpointReader.weight

    def weight(reader, name):
        value = original(reader, name).clone()
        key = (id(reader), name)
        alive.add(key)
        weakref.finalize(value, alive.discard, key)
        peak.append(len(alive))
        return value

    monkeypatch.setattr(CheckpointReader, "weight", weight)
    one = CheckpointReader(open_checkpoint(tmp_path / "ours/global_step7"))
    other = CheckpointReader(open_checkpoint(tmp_path / "ours/global_step7"))
    assert len(list(inspect.describe(one))) == 3 + len(models[1])
    list(inspect.difference(one, other))
    assert max(peak) <= 4


def test_llama_against_itself_in_another_precision(tmp_path, call):  # noqa: F811
    args = resolved(**{**LLAMA, "num_kv_heads": 2})
    model, theirs = hugging_face(args, "llama")
    model.save_pretrained(tmp_path / "hf")
    write_checkpoint(tmp_path / "ours", args, full_tensors(args, "llama", theirs), tp=2, dtype=torch.bfloat16)
    code_, out, error = call(VERIFY, tmp_path / "ours", tmp_path / "hf")
    assert code_ == 0 and float(out.split("fp32: ")[1].split()[0]) < 1e-5, error
    assert sorted(os.listdir(tmp_path)) == ["hf", "ours"]
    assert load_file(tmp_path / "hf/model.safetensors").keys() == theirs.keys()


FIRST_OF_EACH = {architecture: keys for architecture, _, keys in reversed(FAMILY_CASES)}


@pytest.mark.parametrize("architecture", FIRST_OF_EACH)
def test_every_family_is_read_by_our_names(tmp_path, architecture):
    args = resolved(**FIRST_OF_EACH[architecture])
    model, theirs = hugging_face(args, architecture)
    model.save_pretrained(tmp_path / "hf")
    ours = full_tensors(args, architecture, theirs)
    write_checkpoint(tmp_path / "ours", args, ours)
    reader = HuggingFaceReader(HuggingFaceFolder(tmp_path / "hf"))
    assert set(reader.names()) == set(ours)
    for name, tensor in ours.items():
        assert reader.entry(name).shape == tuple(tensor.shape) and torch.equal(reader.weight(name), tensor), name
    found = verify(Place(str(tmp_path / "hf"), "A"), Place(str(tmp_path / "ours"), "B"))
    assert found.logits < 1e-5, found
