"""--push-to-hub: a finished folder to a Hub on this machine; what would fail after the work fails before it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.convert.helpers import LLAMA, random_tensors, resolved, write_checkpoint
from tests.hub.upload_server import UploadHub
from tests.tools.command import ROOT

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(240)]


UPLOAD = "tools/ckpts/upload.py"


def run(environment, *command):
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("HF_")}, **environment}
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture
def folder(tmp_path):
    """Something like an exported model."""
    made = tmp_path / "tiny-llama"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return made


@pytest.mark.slow
def test_a_command_that_exports_pushes_too(tmp_path):
    args = resolved(**LLAMA)
    write_checkpoint(tmp_path / "ckpt", args, random_tensors(args, "llama"), tp=2)
    flags = ["--input_dir", tmp_path / "ckpt", "--output_dir", tmp_path / "tiny-llama", "--no_save_tokenizer"]
    with UploadHub() as hub:
        environment = hub.environment(tmp_path / "home")
        done = run(environment, "tools/ckpts/convert_neox_to_hf.py", *flags, "--push-to-hub")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"{hub.endpoint}/me/tiny-llama"
        made = {path.name: path.read_bytes() for path in (tmp_path / "tiny-llama").iterdir()}
        assert hub.models["me/tiny-llama"].branches["main"] == made and "model.safetensors" in made
        assert hub.models["me/tiny-llama"].private
    # What would fail after the work fails before it.
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path / "home")}
    done = run(environment, "tools/ckpts/convert_neox_to_hf.py", *flags[:3], tmp_path / "other", "--push-to-hub", "a/b")
    assert done.returncode == 2 and re.search(r"cannot write to a/b on the Hub: ", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "other").exists()


def test_the_folder_arrives_and_is_not_sent_twice(tmp_path, folder):
    with UploadHub() as hub:
        environment = hub.environment(tmp_path / "home")
        for _ in range(2):
            done = run(environment, UPLOAD, folder, "tiny")
            assert done.returncode == 0 and done.stdout == f"{hub.endpoint}/me/tiny\n", done.stderr
        made = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert hub.models["me/tiny"].branches["main"] == made
        assert sum("PUT" in line for line in hub.log) == 1 and hub.models["me/tiny"].commits == 1
        done = run(environment, UPLOAD, folder, "tiny", "global_step7")
        assert done.stdout == f"{hub.endpoint}/me/tiny/tree/global_step7\n", done.stderr
        assert hub.models["me/tiny"].branches["global_step7"] == made


@pytest.mark.parametrize(("token", "fact"), [(None, "hf auth login"), ("hf_wrong", r"lab/tiny\b")])
def test_missing_write_access_is_an_error(tmp_path, folder, token, fact):
    with UploadHub() as hub:
        done = run(hub.environment(tmp_path / "home", token), UPLOAD, folder, "lab/tiny")
        assert not hub.models
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(fact, done.stderr)


def test_a_missing_network_is_an_error(tmp_path, folder):
    done = run({"HF_HUB_OFFLINE": "1", "HF_TOKEN": "x", "HF_HOME": str(tmp_path)}, UPLOAD, folder, "lab/tiny")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"\blab/tiny\b.*HF_HUB_OFFLINE", done.stderr)


def test_a_failed_upload_leaves_the_folder_and_names_the_command_to_continue(tmp_path, folder):
    with UploadHub() as hub:
        hub.fail("/commit/", status=403)
        done = run(hub.environment(tmp_path / "home"), UPLOAD, folder, "lab/tiny")
    assert done.returncode == 2 and "Traceback" not in done.stderr and hub.count("/commit/") == 1
    assert f"`python {UPLOAD} {folder} lab/tiny`" in done.stderr
