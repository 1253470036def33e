"""`load` of a Hugging Face model: logits, loss and first update are those of transformers at any layout, and the run
needs its folder no more."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.manifest import Manifest
from megatron.convert.hf.export_hf import export
from megatron.convert.hf.run_config import keep_tokenizer, with_model
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.inference.build import build_stage
from megatron.inference.inputs import requested_checkpoint
from megatron.model.head import LMOutput
from megatron.neox_arguments import NeoXArgs
from megatron.plan.preflight import config_for
from tests.convert.helpers import LLAMA, VOCAB, hugging_face, resolved
from tests.convert.test_tools import vocabulary  # noqa: F401 (a fixture)
from tests.data.hub_server import Hub, Repo
from tests.distributed import run_distributed
from tests.training.runs import digest, process_of, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
LENGTH, BATCH, LR = 24, 4, 1e-3
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-8}}, "weight_decay": 0.0}
ONE_STEP = {**ADAM, "gradient_clipping": 0, "train_iters": 1, "lr_decay_style": "constant", "train_batch_size": BATCH}
ONE_STEP |= {"seq_length": LENGTH, "pack_impl": "unpacked", "eval_iters": 0, "precision": "fp32", "warmup": 0.0}
KINDS = {  # what the model is, and how it is stored
    "sharded": ({"num_kv_heads": 2}, torch.float32),
    "tied, bf16": ({"num_kv_heads": 2, "no_weight_tying": False}, torch.bfloat16),
}


@pytest.fixture
def model(request, tmp_path, vocabulary) -> Any:  # noqa: F811
    """transformers' model, in fp32, of the folder `tmp_path/hf`."""
    keys, kind = KINDS[request.param]
    found, _ = hugging_face(resolved(**{**LLAMA, **keys}), "llama")
    found.to(kind).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    shutil.copytree(vocabulary, tmp_path / "hf", dirs_exist_ok=True)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)


def texts(folder: Path) -> torch.Tensor:
    """One document [b, s + 1] for each row of a step, as token files in `folder`."""
    found = torch.randint(0, VOCAB - 2, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    with IndexedDatasetBuilder(folder / "data", np.uint16) as builder:
        for row in found:
            builder.add_document(row.tolist())
        builder.finalize()
    return found


def prepared(folder: Path, script: str = "train.py", **keys: Any) -> NeoXArgs:
    """The config of a YAML file that names the model alone, as the launcher gives it to the ranks."""
    path = folder / "run.yml"
    path.write_text(yaml.safe_dump({"load": str(folder / "hf"), **keys}, sort_keys=False))
    return config_for(NeoXArgs.from_files([str(path)]), script)


def logits_of(rank: int, world: int, keys: dict[str, Any], layout: Layout, tokens: torch.Tensor) -> Any:
    process = process_of(rank, keys, layout)
    found = requested_checkpoint(process.args)
    stage = build_stage(process.args, process.state, process.tokenizer, found)
    place = (tokens, torch.arange(tokens.shape[1]).expand_as(tokens))

    def all_logits(out: LMOutput) -> torch.Tensor:
        return torch.cat(list(out.logits_at(torch.arange(out.shape[0] * out.shape[1]), 512)))

    said = stage.run(*place, then=all_logits)
    return None if said is None else said[:, :VOCAB]


@pytest.mark.parametrize(
    ("model", "layout"), [("sharded", Layout(tp=2, pp=2)), ("tied, bf16", Layout(tp=2))], indirect=["model"]
)
def test_logits_are_those_of_transformers(tmp_path, model, layout):
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    keys = prepared(tmp_path, "generate.py", precision="fp32").to_dict()
    found = run_distributed(logits_of, layout.world, keys, layout, tokens, timeout=110)
    said = next(one for one in found if one is not None)
    with torch.no_grad():
        wanted = model(tokens).logits.flatten(0, 1)
    torch.testing.assert_close(said, wanted, rtol=1e-4, atol=1e-5)


CELLS = [
    ("tied, bf16", Layout(tp=2, pp=2, micro=2)),
    ("sharded", Layout(dp=2, micro=1, zero=3)),
    ("sharded", Layout(dp=2, micro=2, zero=2, engine="native")),
]


@pytest.mark.parametrize(("model", "layout"), CELLS, indirect=["model"])
def test_the_first_step_is_that_of_transformers(tmp_path, model, layout):
    """Loss and Adam's first update; then the run goes on, and is exported, without the folder."""
    rows, save = texts(tmp_path), tmp_path / "save"
    data = {"train_data_paths": [str(tmp_path / "data")], "save": str(save), **ONE_STEP}
    reports = run(prepared(tmp_path, **data).to_dict(), layout)
    report = reports[0]
    assert not report.error and report.steps == [1]

    of_hash = {digest(row[:-1]): row for row in rows}
    rows = torch.stack([of_hash[sample] for report in reports for sample in report.tokens[0]])
    theirs = copy.deepcopy(model)
    adam = torch.optim.Adam(theirs.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8)
    loss = torch.nn.functional.cross_entropy(theirs(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    adam.step()
    assert report.loss == [pytest.approx(loss.item(), rel=1e-5)]

    shutil.rmtree(tmp_path / "hf")
    export(save, tmp_path / "out", architecture="llama")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = rows[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-3, atol=2e-3)
        assert (ours(tokens).logits - model(tokens).logits).abs().max() > 0.02
    assert (tmp_path / "out/chat_template.jinja").is_file()
    manifest = json.loads((save / "global_step1/manifest.json").read_text())["config"]
    assert manifest["hf_model"]["from"] == str(tmp_path / "hf")
    assert Path(manifest["vocab_file"]) == save / "tokenizer"
    again = run(prepared(tmp_path, **{**data, "train_iters": 2, "override_lr_scheduler": True}).to_dict())[0]
    assert not again.error and again.steps == [2]
    # The run's own checkpoint comes before what it began with; the command line can say otherwise.
    assert prepared(tmp_path, "generate.py", **data).checkpoint.load == str(save)


def refusal(folder: Path, **keys: Any) -> str:
    with pytest.raises(UserError) as raised:
        prepared(folder, **keys)
    return str(raised.value)


def test_keys_that_make_another_network_are_refused_by_name(tmp_path, vocabulary):  # noqa: F811
    hugging_face(resolved(**LLAMA), "llama")[0].save_pretrained(tmp_path / "hf")
    shutil.copytree(vocabulary, tmp_path / "hf", dirs_exist_ok=True)
    wrong = refusal(tmp_path, hidden_size=48, rotary_pct=0.5, num_layers=2, hidden_dropout=0.1, attention_config=None)
    assert "run.yml:2: hidden_size: 48, the model has 32" in wrong and "rotary_pct: 0.5, the model has 1.0" in wrong
    assert "num_layers" not in wrong and "dropout" not in wrong
    free = {"num_layers": 2, "hidden_dropout": 0.1, "attention_config": [[["flash"], "all"]], "seq_length": 20}
    args = prepared(tmp_path, **free)
    assert (args.model.hidden_size, args.model.hidden_dropout, args.model.seq_length) == (32, 0.1, 20)
    assert args.source("hidden_size") == f"{tmp_path}/hf/config.json" and "run.yml:" in args.source("seq_length")
    assert args.tokenizer.vocab_file == str(tmp_path / "hf") and args.tokenizer.model_tokens["config"]
    assert prepared(tmp_path, allow_config_changes=True, rotary_emb_base=1000).model.rotary_emb_base == 1000


def test_the_tokenizer_kept_is_that_of_the_model_that_a_run_begins_with(tmp_path, vocabulary):  # noqa: F811
    """A start with another model, which ended before its first checkpoint, has left its own."""
    save = tmp_path / "save"
    hugging_face(resolved(**LLAMA), "llama")[0].save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in "ab":
        shutil.copytree(vocabulary, tmp_path / name, dirs_exist_ok=True)
        (tmp_path / name / "chat_template.jinja").write_text(name)
    save.mkdir()

    def keep(name: str, own: str | None = None) -> list[str]:
        keep_tokenizer(save, Checkpoint(tmp_path / name, Manifest.empty(0), published=name), own)
        return [(entry / "chat_template.jinja").read_text() for entry in sorted(save.iterdir())]

    assert keep("a") == keep("a") == ["a"]
    assert keep("b", str(save / "tokenizer")) == ["a"]  # the config's own
    assert keep("b", str(tmp_path / "b")) == ["b", "a"]


def test_a_checkpoint_of_others_sets_keys_of_its_model_alone(tmp_path):
    """Its manifest says with what its run began, and may say more: places to send to, files to read."""
    keys = {**{name: LLAMA[name] for name in ("num_layers", "hidden_size", "num_attention_heads")}, "vocab_size": VOCAB}
    more = {"use_wandb": True, "wandb_host": "https://evil.example", "eval_tasks_path": [str(tmp_path)], "seed": 7}
    origin = {"from": "owner/name", "architecture": "LlamaForCausalLM", "keys": {**keys, **more}}
    theirs = Checkpoint(tmp_path, replace(Manifest.empty(0), config={"hf_model": origin}))
    found = with_model(NeoXArgs.from_values({"load": str(tmp_path)}), theirs)
    assert {name: found.get(name) for name in keys} == keys
    assert [name for name in more if found.is_set(name)] == []
    assert found.checkpoint.hf_model["keys"].keys() & more.keys() == set()


def test_what_is_damaged_or_unknown_is_named_before_a_rank_starts(tmp_path):
    whole, _ = hugging_face(resolved(**LLAMA), "llama")
    whole.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    config, shard = tmp_path / "hf/config.json", sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    assert shard.name in refusal(tmp_path)
    shard.unlink()
    assert f"{shard.name} is missing" in refusal(tmp_path)
    shard.write_bytes(content)
    config.write_text(config.read_text().replace('"llama"', '"llamma"'))
    assert "model_type: 'llamma'" in refusal(tmp_path) and "llama" in refusal(tmp_path)
    shutil.rmtree(tmp_path / "hf")
    assert "load: folder" in refusal(tmp_path)


def explained(folder: Path, environment: dict[str, str], load: str) -> subprocess.CompletedProcess[str]:
    """What the launcher says of keys that only the model has."""
    (folder / "run.yml").write_text(yaml.safe_dump({"load": load}))
    command = [
        sys.executable,
        ROOT / "deepy.py",
        ROOT / "train.py",
        "run.yml",
        "--explain",
        "load",
        "--explain",
        "hf_model",
    ]
    run = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": 110}
    return subprocess.run([str(word) for word in command], check=False, **run)


def test_a_model_of_the_hub_is_pinned_to_its_commit(tmp_path, vocabulary):  # noqa: F811
    hugging_face(resolved(**LLAMA), "llama")[0].save_pretrained(tmp_path / "source")
    shutil.copytree(vocabulary, tmp_path / "source", dirs_exist_ok=True)
    with Hub() as hub:
        hub.models["acme/tiny"] = Repo({path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()})
        commit = hub.models["acme/tiny"].commit
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        done = explained(tmp_path, environment, "acme/tiny")
        assert done.returncode == 0 and done.stdout.count(f'"acme/tiny@{commit}"') == 2, done.stderr
        wrong = explained(tmp_path, environment, "acme/tiny@nowhere")
        assert wrong.returncode == 2 and "load: cannot fetch acme/tiny at revision nowhere" in wrong.stderr
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert explained(tmp_path, offline, f"acme/tiny@{commit}").stdout == done.stdout
    (tmp_path / "acme").mkdir()
    wrong = explained(tmp_path, offline, "acme/tiny")
    assert wrong.returncode == 2 and "load: folder acme/tiny does not exist" in wrong.stderr
