"""The commands that are thin faces of the same tables, typed as GPT-NeoX's and its fork's users type them."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.cli import default_output
from megatron.convert.hf.check import compare
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from tests.checkpoint.neox_files import write_neox
from tests.convert import helpers
from tests.convert.families.cases import LAYERED, OLMO
from tests.convert.helpers import LLAMA, NEOX, VOCAB, hugging_face, resolved
from tests.convert.test_tools import TEMPLATE, vocabulary  # noqa: F401 (a fixture)

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = {**NEOX, "gpt_j_residual": True}


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command in this process: its exit code, stdout and stderr."""

    def run(command, *arguments):
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / command), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return run


def published(folder, keys, architecture, tokenizer=None):
    """A random model as transformers saves it, and its tensors."""
    model, theirs = hugging_face(resolved(**keys), architecture)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir() if tokenizer else ():
        shutil.copyfile(file, folder / file.name)
    return theirs


def contents(folder):
    return {file.name: torch.load(file, weights_only=True) for file in sorted(folder.glob("layer_*.pt"))}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("keys", [PARALLEL, {**NEOX, "gpt_j_residual": False}], ids=["parallel", "sequential"])
@pytest.mark.parametrize(("flags", "names"), [((), "te"), (("--no-transformer-engine",), "new")])
def test_files_are_those_that_the_format_s_description_gives(tmp_path, call, flags, names, keys, tp):
    """Against files written from the description alone, name by name; read as ours and as GPT-NeoX's own."""
    theirs = published(tmp_path / "hf", keys, "neox")
    given = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out", "--tp", tp, "--iteration", 9)
    code, out, error = call("huggingface/convert_hf_gptneox_to_neox.py", *given, "--save-tokenizer", *flags)
    assert code == 0 and "logit difference" in out, error
    wanted = contents(write_neox(tmp_path / "neox" / "global_step9", theirs, keys, tp=tp, names=names))
    made = contents(tmp_path / "out/global_step9")
    assert made.keys() == wanted.keys()
    for file, tensors in wanted.items():
        plain = {name: t for name, t in tensors.items() if "_extra_state" not in name}
        assert made[file].keys() == plain.keys()
        for name, tensor in plain.items():
            ranks = [f"{file[:8]}-model_{rank:02d}-model_states.pt" for rank in range(tp)]
            if name.endswith(("dense.bias", "proj.bias", "linear2.bias", "fc2_bias")):
                ours, neox = (sum(each[rank][name] for rank in ranks) for each in (made, wanted))
                torch.testing.assert_close(ours, neox, rtol=1e-6, atol=1e-7)
            elif name in ("word_embeddings.weight", "final_linear.weight"):  # padding is the writer's to choose
                ours, neox = (torch.cat([each[rank][name] for rank in ranks])[:VOCAB] for each in (made, wanted))
                assert torch.equal(ours, neox)
            else:
                assert torch.equal(made[file][name], tensor), name
    args = derive(NeoXArgs.from_files([str(tmp_path / "out/config.yml")]), Facts(vocab_size=VOCAB))
    for reader in (
        CheckpointReader(open_checkpoint(tmp_path / "out/global_step9")),
        NeoXReader(open_checkpoint(tmp_path / "out/global_step9"), args.model, VOCAB),
    ):
        assert compare(reader, args.model, tmp_path / "hf", torch.float32).logits < 1e-5
    state = torch.load(tmp_path / "out/global_step9" / f"mp_rank_{tp - 1:02d}_model_states.pt", weights_only=True)
    assert state["module"] is None and state["iteration"] == 9 and state["args"]["model_parallel_size"] == tp
    assert {"lr_scheduler", "global_steps", "dp_world_size", "mp_world_size", "skipped_steps"} <= state.keys()


def test_a_face_refuses_other_families(tmp_path, call):
    published(tmp_path / "hf", LLAMA, "llama")
    given = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out")
    for command, takes in (("convert_hf_gptneox_to_neox", "takes neox"), ("convert_hf_olmo_to_neox", "takes olmo2")):
        code, _, error = call(f"huggingface/{command}.py", *given)
        assert code == 2 and "of the family llama" in error and takes in error
        assert "convert_hf_to_neox.py" in error
    code, _, error = call("huggingface/convert_hf_to_neox.py", *given, "--precision", "int4")
    assert code == 2 and "'int4' is not known" in error
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(("architecture", "keys"), [("olmo2", OLMO), ("olmo3", {**OLMO, **LAYERED})])
def test_olmo_there_and_back(tmp_path, call, vocabulary, architecture, keys):  # noqa: F811
    theirs = published(tmp_path / "hf", keys, architecture, vocabulary)
    given = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out", "--tp", 2, "--dtype", "float32")
    code, out, error = call("huggingface/convert_hf_olmo_to_neox.py", *given, "--iteration", 4, "--save-tokenizer")
    assert code == 0 and f"{tmp_path}/out/global_step4" in out, error
    back = ("--checkpoint-dir", tmp_path / "out", "--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "one")
    code, out, error = call("huggingface/convert_neox_olmo_to_hf.py", *back, "--iteration", 4)
    assert code == 0 and "logit difference" in out, error
    other = ("--neox-checkpoint", tmp_path / "out", "--reference-model", tmp_path / "hf", "--dtype", "bfloat16")
    code, out, error = call("huggingface/convert_neox_to_hf_olmo.py", *other, "--output-dir", tmp_path / "two")
    assert code == 0, error
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == theirs.keys() and all(torch.equal(one[name], tensor) for name, tensor in theirs.items())
    assert all(torch.equal(two[name], tensor.bfloat16()) for name, tensor in theirs.items())
    opened = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert opened("w3 w7").input_ids == [3, 7]
    assert opened.apply_chat_template([{"role": "user", "content": "w3"}], tokenize=False) == "<user>w3"
    code, _, error = call("huggingface/convert_neox_olmo_to_hf.py", *back, "--iteration", 5, "--overwrite")
    assert code == 2 and re.search(r"iteration 5 in .*: .*\[\d\]", error)


def test_the_published_model_gives_the_network_of_a_folder_of_neox(tmp_path, call, vocabulary):  # noqa: F811
    """Files of the fork's own converter (module in module), without any config."""
    keys = {**OLMO, "model_parallel_size": 1}
    theirs = published(tmp_path / "hf", keys, "olmo2", vocabulary)
    folder = write_neox(tmp_path / "neox" / "global_step9", theirs, keys, form="nested")
    back = ("--checkpoint-dir", folder.parent, "--output-dir", tmp_path / "back")
    code, _, error = call("huggingface/convert_neox_olmo_to_hf.py", *back)
    assert code == 2 and "keeps no config" in error
    code, out, error = call("huggingface/convert_neox_olmo_to_hf.py", *back, "--hf-model", tmp_path / "hf")
    assert code == 0 and "logit difference" in out, error
    again = load_file(tmp_path / "back/model.safetensors")
    assert again.keys() == theirs.keys() and all(torch.equal(again[name], t) for name, t in theirs.items())
    assert (tmp_path / "back/chat_template.jinja").read_text() == TEMPLATE


def test_another_published_model_is_refused(tmp_path, call):
    published(tmp_path / "hf", OLMO, "olmo2")
    published(tmp_path / "other", {**OLMO, "num_layers": 3, "rotary_emb_base": 700}, "olmo2")
    given = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out")
    assert call("huggingface/convert_hf_olmo_to_neox.py", *given)[0] == 0
    back = ("--checkpoint-dir", tmp_path / "out", "--hf-model", tmp_path / "other", "--output-dir", tmp_path / "back")
    code, _, error = call("huggingface/convert_neox_olmo_to_hf.py", *back)
    assert code == 2 and "num_layers: 3 there, 2 in the checkpoint" in error and "rotary" not in error
    assert sorted(os.listdir(tmp_path)) == ["hf", "other", "out"]


def test_llama_with_the_flags_of_neox(tmp_path, call):
    published(tmp_path / "hf", {**LLAMA, "num_kv_heads": 2}, "llama")
    given = ("--tp", 2, "--pp", 0, "--model", tmp_path / "hf", "--model_path", tmp_path / "out")
    code, out, error = call("tools/ckpts/convert_hf_llama_to_neox.py", *given)
    assert code == 0 and f"{tmp_path}/out/global_step0" in out, error
    args = NeoXArgs.from_files([str(tmp_path / "out/config.yml")])
    assert (args.get("model_parallel_size"), args.get("pipe_parallel_size")) == (2, 0)
    code, _, error = call("tools/ckpts/convert_hf_llama_to_neox.py", *given[2:], "--tp", 4, "--overwrite")
    assert code == 2 and "num_kv_heads 2 cannot be split over 4" in error
    assert (tmp_path / "out/latest").read_text() == "global_step0"


def test_sequential_with_the_flags_of_neox(tmp_path, call):
    published(tmp_path / "hf", PARALLEL, "neox")
    run = tmp_path / "run.yml"
    run.write_text(yaml.safe_dump({**PARALLEL, "num_layers": 3}))
    given = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out", "--test")
    code, _, error = call("tools/ckpts/convert_hf_to_sequential.py", *given, "--config", run)
    assert code == 2 and "num_layers: 3 there, 2 in the model" in error and not (tmp_path / "out").exists()
    run.write_text(yaml.safe_dump(PARALLEL))
    code, out, error = call("tools/ckpts/convert_hf_to_sequential.py", *given, "--config", run, "--iteration", 143000)
    assert code == 0 and f"{tmp_path}/out/global_step143000" in out and "logit difference" in out, error
    assert NeoXArgs.from_files([str(tmp_path / "out/config.yml")]).get("pipe_parallel_size") == 0
    code, _, error = call("tools/ckpts/convert_hf_to_sequential.py", "--output-dir", tmp_path / "x")
    assert code == 2 and "--hf-model-name or --hf-model" in error


def test_sequential_under_the_launcher(tmp_path, call, monkeypatch):
    """`deepy.py tools/ckpts/convert_hf_to_sequential.py CONFIGS load=MODEL save=FOLDER`: rank 0 converts, once."""
    published(tmp_path / "hf", PARALLEL, "neox")
    run = {**PARALLEL, "load": str(tmp_path / "hf"), "save": str(tmp_path / "out"), "model_parallel_size": 2}
    resolved_file = tmp_path / "resolved.json"
    resolved_file.write_text(derive(NeoXArgs.from_saved(run)).to_resolved())
    monkeypatch.setenv("RANK", "1")
    assert call("tools/ckpts/convert_hf_to_sequential.py", "--resolved", resolved_file)[0] == 0
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("RANK", "0")
    code, out, error = call("tools/ckpts/convert_hf_to_sequential.py", "--resolved", resolved_file)
    assert code == 0 and f"{tmp_path}/out/global_step0" in out and "logit difference" in out, error
    assert NeoXArgs.from_files([str(tmp_path / "out/config.yml")]).get("model_parallel_size") == 2
    resolved_file.write_text(derive(NeoXArgs.from_saved({**run, "num_layers": 3, "save": "x"})).to_resolved())
    code, _, error = call("tools/ckpts/convert_hf_to_sequential.py", "--resolved", resolved_file)
    assert code == 2 and "num_layers: 3 there, 2 in the model" in error


def test_a_checkpoint_named_after_the_model(tmp_path, call, monkeypatch):
    """Without --output-dir, as the fork's documents call it: checkpoints/ and the name without its owner and `sfm-`."""
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "owner/sfm-small", PARALLEL, "neox")
    code, out, error = call("huggingface/convert_hf_gptneox_to_neox.py", "--hf-model", "owner/sfm-small", "--no-check")
    assert code == 0 and f"{tmp_path}/checkpoints/small/global_step0" in out, error
    published(tmp_path / "allenai/tiny", OLMO, "olmo2")
    given = ("--hf-model", "allenai/tiny", "--tp", 2, "--save-tokenizer", "--no-check")
    code, out, error = call("huggingface/convert_hf_olmo_to_neox.py", *given)
    assert code == 0 and f"{tmp_path}/checkpoints/tiny/global_step0" in out, error


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("owner/sfm-small", "small"),
        ("/runs/hf/demo/global_step60", "demo"),
        ("/runs/demo/checkpoints/global_step60/", "demo"),
        ("/runs/demo", "demo"),
        ("global_step60", "here"),
        (".", "here"),
        ("../here/../here", "here"),
        ("owner/global_stepper", "global_stepper"),
    ],
)
def test_the_name_of_a_model_s_folder(tmp_path, monkeypatch, model, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert default_output(model, "/made") == f"/made/{name}"


def test_every_import_without_output_dir_goes_there(tmp_path, call, monkeypatch):
    monkeypatch.setenv("DEEPY_CHECKPOINTS", str(tmp_path / "made"))
    published(tmp_path / "demo/global_step60", PARALLEL, "neox")
    given = ("--hf-model", tmp_path / "demo/global_step60", "--iteration", 7, "--no-check")
    code, out, error = call("huggingface/convert_hf_to_neox.py", *given)
    assert code == 0 and f"{tmp_path}/made/demo/global_step7" in out, error


@pytest.mark.parametrize(("names", "form"), [("legacy", "pipe"), ("new", "whole"), ("te", "pipe")])
def test_merging_the_files_of_two_ranks(tmp_path, call, monkeypatch, names, form):
    monkeypatch.setattr(helpers, "VOCAB", 512)  # of the tokenizer of characters
    run = {"tokenizer_type": "CharLevelTokenizer", "model_parallel_size": 2, "train_batch_size": 2}
    theirs = published(tmp_path / "hf", PARALLEL, "neox")
    folder = write_neox(tmp_path / "neox" / "global_step9", theirs, PARALLEL, tp=2, names=names, form=form)
    (tmp_path / "20B.yml").write_text(yaml.safe_dump({**PARALLEL, **run}))
    given = ("--input_dir", folder.parent, "--config_file", tmp_path / "20B.yml")
    code, out, error = call("tools/ckpts/merge20b.py", *given, "--output_dir", tmp_path / "merged")
    assert code == 0 and out == f"{tmp_path}/merged/global_step9\n", error
    again = ("--input_dir", tmp_path / "merged", "--output_dir", tmp_path / "cut", "--tp", 4)
    code, _, error = call("tools/ckpts/merge20b.py", *again)
    assert code == 0, error
    for made, tp in (("merged", 1), ("cut", 4)):
        reader = CheckpointReader(open_checkpoint(tmp_path / made / "global_step9"))
        assert reader.tp_size == tp
        args = derive(NeoXArgs.from_files([str(tmp_path / "20B.yml")]), Facts(vocab_size=512))
        assert compare(reader, args.model, tmp_path / "hf", torch.float32).logits < 1e-5
    code, _, error = call("tools/ckpts/merge20b.py", *again)
    assert code == 2 and "--overwrite" in error
    code, _, error = call("tools/ckpts/merge20b.py", *given, "--output_dir", folder.parent)
    assert code == 2 and f"--output_dir: {tmp_path}" in error


def test_a_folder_with_a_ready_config_can_be_moved(tmp_path, call, vocabulary, monkeypatch):  # noqa: F811
    published(tmp_path / "hf", LLAMA, "llama", vocabulary)
    call("huggingface/convert_hf_to_neox.py", "--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out")
    assert str(tmp_path) not in "".join(
        line for line in (tmp_path / "out/config.yml").read_text().splitlines() if not line.startswith("#")
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").rename(tmp_path / "elsewhere/new name")
    monkeypatch.chdir(tmp_path / "elsewhere")
    args = NeoXArgs.from_files(["new name/config.yml"])
    assert args.get("load") == f"{tmp_path}/elsewhere/new name"
    assert args.get("vocab_file") == f"{tmp_path}/elsewhere/new name/tokenizer"
    flags = ("--input_dir", "new name", "--output_dir", "hf")
    code, _, error = call("tools/ckpts/convert_neox_to_hf.py", *flags)
    assert code == 0, error
    assert AutoTokenizer.from_pretrained("hf")("w3").input_ids == [3]
    assert json.loads(Path("hf/config.json").read_text())["model_type"] == "llama"


def test_one_of_several_steps_is_exported(tmp_path, call):
    theirs = {}
    for step in (1, 2):
        keys = {**LLAMA, "init_method_std": 0.1 * step}
        model, theirs[step] = hugging_face(resolved(**keys), "llama", seed=step)
        model.save_pretrained(tmp_path / "hf")
        given = ("--hf-model", tmp_path / "hf", "--output-dir", tmp_path / "out", "--iteration", step)
        assert call("huggingface/convert_hf_to_neox.py", *given)[0] == 0
    flags = ("--input_dir", tmp_path / "out", "--output_dir", tmp_path / "back", "--no_save_tokenizer")
    code, _, error = call("tools/ckpts/convert_neox_to_hf.py", *flags, "--iteration", 1)
    assert code == 0, error
    back = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs[1].items())
    code, _, error = call("tools/ckpts/convert_neox_to_hf.py", *flags, "--iteration", 3, "--overwrite")
    assert code == 2 and "[1, 2]" in error
