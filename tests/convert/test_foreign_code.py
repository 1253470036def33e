"""A checkpoint is data: no tool imports code, or reads other files, because somebody else's checkpoint names them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.checkpoint.neox_files import write_neox
from tests.convert.helpers import NEOX, VOCAB, full_tensors, hugging_face, resolved, write_checkpoint
from tests.convert.test_faces import ROOT, call  # noqa: F401 (a fixture)
from tests.plugins.helpers import remembered

pytestmark = pytest.mark.cpu

KEYS = {**NEOX, "gpt_j_residual": True}
RUN = {**KEYS, "tokenizer_type": "CharLevelTokenizer", "vocab_size": VOCAB, "train_batch_size": 2}
TOOLS = {
    "tools/ckpts/inspect_checkpoints.py": ("{input}",),
    "tools/ckpts/verify.py": ("{input}", "hf"),
    "tools/ckpts/merge20b.py": ("--input_dir", "{input}", "--output_dir", "out"),
    "tools/ckpts/convert_neox_to_hf.py": ("--input_dir", "{input}", "--output_dir", "out", "--no_save_tokenizer"),
    "tools/ckpts/convert_neox_to_raw_llama.py": ("--input_dir", "{input}", "--output_dir", "out"),
    "tools/ckpts/convert_neox_to_mamba_ssm.py": ("--input_dir", "{input}", "--output_dir", "out"),
    "huggingface/convert_neox_olmo_to_hf.py": ("--checkpoint-dir", "{input}", "--output_dir", "out"),
}
READ_NO_CONFIG = "tools/ckpts/inspect_checkpoints.py"  # of a Deepy checkpoint: names and shapes are in the manifest


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with remembered():
        yield


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model as `hf`, `save/global_step7` (Deepy's) and `neox/global_step9` with the copy of its run's config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as the tools do with the repository's root
    args = resolved(**KEYS)
    model, theirs = hugging_face(args, "neox")
    model.save_pretrained("hf")
    write_checkpoint(Path("save"), args, full_tensors(args, "neox", theirs), tp=2)
    write_neox(Path("neox/global_step9"), theirs, KEYS, tp=2)
    write_config(Path("neox/global_step9/configs/run.yml"))
    return tmp_path


def write_config(path: Path, **more: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**RUN, "model_parallel_size": 2, **more}))


def write_payload(path: Path) -> Path:
    """Code that leaves a file `ran` in the working directory, and where it was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("from pathlib import Path\nPath('ran').write_text(__file__)\n")
    return path


def name_in_manifest(name: str) -> None:
    path = Path("save/global_step7/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["config"]["plugins"] = [name]
    path.write_text(json.dumps(manifest))


def fill(arguments: tuple[str, ...], folder: str) -> list[str]:
    return [argument.replace("{input}", folder) for argument in arguments]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("neox/global_step9/configs/payload.py", "payload.py"),  # next to the config that names it
        ("payload.py", "payload.py"),  # in the working directory
        ("plug_shop/payload.py", "plug_shop.payload"),  # a module under the repository's root
    ],
)
def test_no_tool_runs_what_a_gpt_neox_folder_names(work, call, where, name):  # noqa: F811
    write_payload(work / where)
    write_config(work / "neox/global_step9/configs/run.yml", plugins=[name])
    for tool, arguments in TOOLS.items():
        code, _, error = call(tool, *fill(arguments, "neox/global_step9"))
        typed = where if name.endswith(".py") else name
        assert code == 2 and "run.yml:" in error and re.search(rf"--plugins \S*{typed},", error), (tool, error)
        assert not (work / "ran").exists() and not (work / "out").exists(), tool


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("save/payload.py", "save/payload.py"),  # in the save folder
        ("plug_shop/payload.py", "plug_shop.payload"),  # a module under the repository's root
        ("payload.py", "{folder}/payload.py"),  # one level above the save folder
    ],
)
def test_no_tool_runs_what_the_manifest_names(work, call, where, name):  # noqa: F811
    write_payload(work / where)
    name = name.format(folder=work)
    name_in_manifest(name)
    for tool, arguments in TOOLS.items():
        code, _, error = call(tool, *fill(arguments, "save"))
        if tool != READ_NO_CONFIG:
            assert code == 2 and "manifest.json: " in error and f"--plugins {name}" in error, (tool, error)
        assert not (work / "ran").exists() and not (work / "out").exists(), tool


def test_a_fresh_process_runs_nothing(work):
    write_payload(work / "neox/global_step9/configs/payload.py")
    write_config(work / "neox/global_step9/configs/run.yml", plugins=["payload.py"])
    command = [sys.executable, str(ROOT / READ_NO_CONFIG), "neox/global_step9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 2 and "payload.py is code" in done.stderr and not (work / "ran").exists(), done.stderr


def test_an_import_next_to_other_steps_runs_nothing(work, call):  # noqa: F811
    given = ("--hf-model", "hf", "--output-dir", "shop", "--no-check")
    assert call("huggingface/convert_hf_to_neox.py", *given, "--iteration", 1)[0] == 0
    write_payload(work / "shop/payload.py")
    with (work / "shop/config.yml").open("a") as file:
        file.write("plugins: [payload.py]\n")
    code, _, error = call("huggingface/convert_hf_to_neox.py", *given, "--iteration", 2)
    assert code == 2 and "config.yml:" in error and f"--plugins {work}/shop/payload.py," in error, error
    assert not (work / "ran").exists()


def test_the_advice_works_as_typed_and_runs_the_user_s_file(work, call):  # noqa: F811
    write_payload(work / "shop/payload.py")
    mine = write_payload(work / "mine/payload.py")
    name_in_manifest(str(work / "shop/payload.py"))
    write_config(work / "neox/global_step9/configs/run.yml", plugins=["payload.py"])
    (work / "mine.yml").write_text(f"plugins: [{mine}]\n")
    for flags in (("--plugins", "mine/payload.py"), ("--config_file", "mine.yml")):
        for folder in ("save", "neox/global_step9"):
            if folder != "save" and flags[0] == "--config_file":
                continue  # there the user's files replace the copy
            with remembered():
                code, out, error = call("tools/ckpts/verify.py", folder, "hf", *flags)
            assert code == 0 and "largest logit difference" in out, error
            assert (work / "ran").read_text() == str(mine)
            (work / "ran").unlink()


def test_the_file_next_to_its_config_is_named_as_it_can_be_typed(work, call):  # noqa: F811
    write_config(work / "neox/global_step9/configs/run.yml", plugins=["payload.py"])
    theirs = write_payload(work / "neox/global_step9/configs/payload.py")
    code, _, error = call("tools/ckpts/verify.py", "neox/global_step9", "hf")
    advised = re.search(r"give (--plugins) ([^,]+),", error)
    assert code == 2 and advised and not (work / "ran").exists(), error
    with remembered():
        code, _, error = call("tools/ckpts/verify.py", "neox/global_step9", "hf", *advised.groups())
    assert code == 0 and (work / "ran").read_text() == str(theirs), error


def test_verify_runs_no_code_of_a_hugging_face_folder(work, call, monkeypatch):  # noqa: F811
    """`transformers` asks on a terminal whether to run it, unless it is told not to (here with a yes at hand)."""
    monkeypatch.setattr("builtins.input", lambda *_: (work / "ran").touch() or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 1)
    (work / "theirs").mkdir()
    for file in Path("hf").iterdir():
        (work / "theirs" / file.name).write_bytes(file.read_bytes())
    config = json.loads(Path("hf/config.json").read_text())
    where = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    Path("theirs/config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": where}))
    write_payload(work / "theirs/mine.py")
    code, _, error = call("tools/ckpts/verify.py", "theirs", "theirs")
    assert code == 2 and "'mine'" in error and "not run" in error and "trust_remote_code" not in error, error
    # A class that transformers has needs none of it.
    Path("theirs/config.json").write_text(json.dumps({**config, "auto_map": where}))
    code, out, error = call("tools/ckpts/verify.py", "theirs", "hf")
    assert code == 0 and "largest logit difference" in out, error
    assert not (work / "ran").exists()


@pytest.mark.parametrize("more", [{"extends": "../../../secret.yml"}, {"mixture": "../../../secret"}])
def test_a_kept_config_reads_no_other_file(work, call, more):  # noqa: F811
    (work / "secret.yml").write_text("my_secret: 7\n")
    write_config(work / "neox/global_step9/configs/run.yml", **more)
    code, _, error = call("tools/ckpts/inspect_checkpoints.py", "neox/global_step9")
    assert code == 2 and f"{next(iter(more))} names other files" in error and "my_secret" not in error, error
    assert f"--config_file {'neox/global_step9/configs/run.yml'}" in error
