"""documentation/conversion.md: every command in it works as written, every command and family that exists is named."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron.convert.families import FAMILIES
from tests.convert.families.cases import OLMO
from tests.convert.helpers import LLAMA, NEOX, hugging_face, resolved
from tests.convert.raw.raw_files import raw_tensors, write_raw
from tests.convert.test_tools import vocabulary  # noqa: F401 (a fixture)
from tests.documented import ROOT, commands

pytestmark = pytest.mark.cpu

GUIDE = (ROOT / "documentation" / "conversion.md").read_text(encoding="utf-8")
EVEN = 68  # tokens that two files of LLaMA's divide
PYTHIA = {**NEOX, "gpt_j_residual": True}
GQA = {**LLAMA, "num_kv_heads": 2, "intermediate_size": 88}


def published(folder, keys, architecture, tokenizer):
    model, theirs = hugging_face(resolved(**keys), architecture)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
    return theirs


@pytest.fixture
def hub(tmp_path, monkeypatch, vocabulary):  # noqa: F811
    """The models that the guide names, tiny, as folders of these names instead of downloads (tested elsewhere)."""
    places = {
        "EleutherAI/pythia-70m": (PYTHIA, "neox"),
        "meta-llama/Llama-2-7b-hf": (GQA, "llama"),
        "allenai/OLMo-2-1124-7B": (OLMO, "olmo2"),
    }
    for name, (keys, architecture) in places.items():
        published(tmp_path / name, keys, architecture, vocabulary)
    monkeypatch.setattr("tests.convert.helpers.VOCAB", EVEN)
    theirs = published(tmp_path / "raw-hf", GQA, "llama", vocabulary)
    params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 500.0}
    write_raw(tmp_path / "LLaMA" / "7B", raw_tensors(theirs, 4, 2), {**params, "vocab_size": -1, "multiple_of": 8}, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_works(tmp_path, hub, monkeypatch, warm_python):
    monkeypatch.chdir(tmp_path)
    for name in ("tools", "huggingface", "deepy.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "configs/pythia").mkdir(parents=True)
    shutil.copy(ROOT / "configs/local_setup.yml", tmp_path / "configs")
    (tmp_path / "configs/pythia/70M.yml").write_text(yaml.safe_dump(PYTHIA | {"train_micro_batch_size_per_gpu": 1}))
    given = commands("documentation/conversion.md", ("bash",))
    assert len(given) > 15 and all(command.startswith("python ") for command in given)
    for command in given:
        done = warm_python.run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout and "Traceback" not in done.stderr, command
    for one, other in (("EleutherAI/pythia-70m", "hf"), ("allenai/OLMo-2-1124-7B", "olmo-hf")):
        theirs, again = (load_file(f"{folder}/model.safetensors") for folder in (one, other))
        assert theirs.keys() == again.keys() and all(torch.equal(again[n], tensor) for n, tensor in theirs.items())
    first, again = (
        torch.load(f"{folder}/consolidated.01.pth", weights_only=True) for folder in ("LLaMA/7B", "raw-again")
    )
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items()) and len(again) == len(first) - 1


def test_every_command_and_family_is_named():
    tools = [f"tools/ckpts/{path.name}" for path in (ROOT / "tools" / "ckpts").glob("*.py")]
    tools += [f"huggingface/{path.name}" for path in (ROOT / "huggingface").glob("convert*.py")]
    assert len(tools) > 10
    assert [tool for tool in tools if f"`{tool}" not in GUIDE] == []
    table = GUIDE[GUIDE.index("| `--architecture`") : GUIDE.index("## From Hugging Face")]
    assert [name for name in FAMILIES if f"`{name}`" not in table] == []


def test_every_flag_named_exists():
    source = "".join(
        path.read_text() for path in [*(ROOT / "tools/ckpts").glob("*.py"), *(ROOT / "huggingface").glob("*.py")]
    )
    source += (ROOT / "megatron/convert/cli.py").read_text()
    named = set(re.findall(r"--[a-z][a-z_-]+", GUIDE))
    assert {flag for flag in named if f'"{flag}"' not in source} == {"--help", "--no-transformer-engine"}
