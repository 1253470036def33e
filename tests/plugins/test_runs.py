"""The guide's examples as a user runs them: train split and alone, resume, generate, export and import."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron.convert.hf.export_hf import export
from megatron.convert.hf.import_hf import import_model
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.neox_arguments import plugin_key
from tests.plugins.helpers import ROOT, remembered, save_starcoder2, write_config, write_family, write_layers

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(600)]

DROP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
SPLIT = ("model_parallel_size=2", "pipe_parallel_size=2")


def python(folder: Path, script: str, *argv: str, code: int = 0) -> str:
    """Run one of our scripts in `folder`; what it says."""
    env = {k: v for k, v in os.environ.items() if k not in DROP} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / script), *argv]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    return text


def deepy(folder: Path, script: str, *argv: str, code: int = 0) -> str:
    return python(folder, "deepy.py", str(ROOT / script), *argv, code=code)


def losses(run: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/lm_loss"] for record in records if "train/lm_loss" in record}


def write_tokens(folder: Path) -> None:
    numbers = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "tokens_text_document", np.uint16) as builder:
        for _ in range(50):
            builder.add_document(numbers.integers(32, 127, size=100))
        builder.finalize()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first example, trained on four ranks with checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("example")
    write_layers(folder)
    write_tokens(folder)
    text = deepy(folder, "train.py", "my_run.yml", *SPLIT)
    said = "norm: absnorm, activation: re2glu, attention_config: average, train_impl: focal"
    assert text.count(f"plugin {folder}/my_layers.py (sha256 ") == 1 and f"registers {said}" in text
    return folder


def test_the_dry_run_shows_what_each_plugin_registers(trained: Path) -> None:
    text = deepy(trained, "train.py", "my_run.yml", *SPLIT, "save=elsewhere", "--dry-run")
    section = text[text.index("== plugins") :].split("\n\n")[0]
    assert re.search(
        r"my_layers\.py +[0-9a-f]{12} +norm: absnorm, activation: re2glu, attention_config: average, train_impl: focal",
        section,
    )
    assert "attention average x2, global x2" in text


def resume(folder: Path, name: str) -> str:
    """A run folder that holds the first one's checkpoint of step 3 alone."""
    (folder / name).mkdir()
    shutil.copytree(folder / "run/global_step3", folder / name / "global_step3")
    (folder / name / "latest").write_text("global_step3")
    return name


def test_another_layout_resumes_and_reports_that_the_plugin_changed(trained: Path) -> None:
    straight, plugin = losses(trained / "run"), trained / "my_layers.py"
    assert list(straight) == [1, 2, 3, 4, 5, 6]
    source = plugin.read_text()
    plugin.write_text(source + "\n# another version\n")
    try:
        text = deepy(trained, "train.py", "my_run.yml", f"save={resume(trained, 'resumed')}", "model_parallel_size=1")
    finally:
        plugin.write_text(source)
    assert text.count("my_layers.py has another source (sha256 ") == 1
    assert "changed since the checkpoint: plugin_sources" not in text
    again = losses(trained / "resumed")
    assert list(again) == [4, 5, 6]
    assert [*again.values()] == pytest.approx([straight[step] for step in again], rel=1e-5)


def test_texts_are_those_of_the_whole_prefix_on_any_layout(trained: Path) -> None:
    (trained / "prompts.txt").write_text("abc\nThe moving average\n")
    texts = []
    for name, overrides in (("cached", ("model_parallel_size=2",)), ("whole", ("recompute=true",))):
        given = ("text_gen_type=input-file", "-i", "prompts.txt", "-o", f"{name}.jsonl", "maximum_tokens=8")
        deepy(trained, "generate.py", "my_run.yml", *overrides, *given)
        records = [json.loads(line) for line in (trained / f"{name}.jsonl").read_text().splitlines()]
        texts.append([record["text"] for record in records])
    assert texts[0] == texts[1] and len(texts[0]) == 2 and all(texts[0])


def test_a_plugin_that_is_gone_is_named_by_every_command(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    for part in ("bin", "idx"):
        (tmp_path / f"tokens_text_document.{part}").symlink_to(trained / f"tokens_text_document.{part}")
    write_layers(tmp_path)
    (tmp_path / "my_layers.py").unlink()
    for script in ("train.py", "generate.py"):
        text = deepy(tmp_path, script, "my_run.yml", code=2)
        assert re.search(r"my_run\.yml:1: plugins: there is no file my_layers\.py; looked for /", text), text


@pytest.mark.full
def test_every_kind_of_entry_trains(tmp_path: Path) -> None:
    """The ones that the guide's examples leave out."""
    write_tokens(tmp_path)
    shutil.copy(Path(__file__).with_name("everything.py"), tmp_path / "everything.py")
    keys = yaml.safe_load(write_layers(tmp_path).read_text())
    for name in ("norm", "activation", "plugin_options", "train_impl", "gated_width_rule"):
        del keys[name]
    keys |= {
        "plugins": ["everything.py"],
        "attention_config": ["global", "Halving", "global", "Halving"],
        "mlp_config": [[["narrow", "dense"], "all"]],
        "pos_emb": "ramp",
        "init_method": "constant",
        "attention_backend": "by_formula",
        "optimizer": {"type": "SignDescent", "params": {"lr": 1e-3, "persistence": 0.5}},
        "lr_decay_style": "square",
        "tokenizer_type": "letters",
        "zero_optimization": {"stage": 1},
    }
    write_config(tmp_path / "all.yml", **keys)
    deepy(tmp_path, "train.py", "all.yml", *SPLIT)
    deepy(tmp_path, "train.py", "all.yml", f"save={resume(tmp_path, 'resumed')}", "num_gpus=2")
    straight, again = losses(tmp_path / "run"), losses(tmp_path / "resumed")
    assert list(again) == [4, 5, 6]
    # Signs of gradients that are nearly zero depend on the order of sums.
    assert [*again.values()] == pytest.approx([straight[step] for step in again], rel=1e-3)


# ---- the family


def test_the_family_goes_both_ways(tmp_path: Path) -> None:
    plugin = write_family(tmp_path)
    save_starcoder2(tmp_path / "theirs")

    with pytest.raises(UserError, match="model_type: 'starcoder2' is not known here"):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    named = ("--plugins", "my_family.py")
    flags = ("--hf-model", "theirs", "--output-dir", "ours", "--tp", "2", *named)
    python(tmp_path, "huggingface/convert_hf_to_neox.py", *flags)
    assert yaml.safe_load((tmp_path / "ours/config.yml").read_text())["plugins"] == [str(plugin)]

    options = {"tokenizer": False}
    with remembered(), pytest.raises(UserError, match=r"'starcodr2' .*'starcoder2'"):
        plugin_key.import_named([str(plugin)], "--plugins")
        export(tmp_path / "ours", tmp_path / "hf", architecture="starcodr2", **options)
    command = ("tools/ckpts/convert_neox_to_hf.py", "--input_dir", "ours", "--output_dir", "hf", "--no_save_tokenizer")
    assert "manifest.json: plugins: " in python(tmp_path, *command, code=2)
    text = python(tmp_path, *command, *named)
    assert "Starcoder2ForCausalLM" in text and float(text.rsplit("largest ", 1)[1].split()[0]) < 1e-4, text
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    # Its plugin has moved: a config that names it is enough.
    (tmp_path / "elsewhere").mkdir()
    plugin.rename(tmp_path / "elsewhere/my_family.py")
    with pytest.raises(UserError, match=r"manifest\.json: plugins: .*my_family\.py is code"):
        export(tmp_path / "ours", tmp_path / "hf2", **options)
    moved = write_config(tmp_path / "elsewhere/moved.yml", plugins=["my_family.py"])
    export(tmp_path / "ours", tmp_path / "hf2", config_files=[moved], **options)
    assert (tmp_path / "hf2/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()
