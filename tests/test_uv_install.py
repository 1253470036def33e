"""The environment: `pytest tests/test_uv_install.py` says whether the one that runs it is good; and how it is made.

setup_uv_env.sh builds one here from the files that Dockerfile and apptainer.def copy, so those lists are complete.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.commands import environment, make_folder
from tools.check_environment import check_arch_flags, check_imports, check_locks, check_packages

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[1]
CHECK = "tools/check_environment.py"


@pytest.mark.slow
def test_this_environment_is_ready() -> None:
    done = subprocess.run([sys.executable, CHECK], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("\nready\n") and re.search(r"^ok +torch +2\.", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_small_model_learns(tmp_path: Path) -> None:
    """On the GPU where there is one: a text of repeated letters loses more than half of its loss."""
    folder = make_folder(tmp_path)
    argv = ["train_iters=60", "log_interval=1", "train_micro_batch_size_per_gpu=8", "optimizer.params.lr=0.01"]
    command = [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), "run.yml", *argv]
    env = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110)
    losses = [float(found) for found in re.findall(r"lm_loss: (\S+)", done.stdout + done.stderr)]
    assert done.returncode == 0 and len(losses) == 60, done.stderr[-2000:]
    assert losses[-1] < losses[0] / 2


def test_packages_that_are_missing_or_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "wanted.txt").write_text("pytest==0.1\nno-such-package-zz==1.0\nwin==1; sys_platform == 'win32'\n")
    found = {finding.name: finding for finding in check_packages(tmp_path / "wanted.txt")}
    assert found["pytest"].grade == "note" and "==0.1" in found["pytest"].found
    assert found["no-such-package-zz"].grade == "wrong" and "wanted.txt" in found["no-such-package-zz"].found
    assert "win" not in found


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_wheel.py").write_text("raise OSError('libcudart.so.99: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = check_imports(("broken_wheel",))
    assert finding.grade == "wrong" and "libcudart.so.99" in finding.found


def test_the_lock_of_a_killed_build(tmp_path: Path) -> None:
    for name, age in (("old", 7200), ("new", 0)):
        lock = tmp_path / "py311_cpu" / name / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - age,) * 2)
    (finding,) = check_locks(tmp_path)
    assert finding.grade == "wrong" and "old/lock" in finding.found


def test_gh200_with_the_torch_that_is_installed_and_with_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    assert [finding.grade for finding in check_arch_flags()] == ["ok"]

    def read_as_torch_2_5() -> list[int]:
        assert "TORCH_CUDA_ARCH_LIST" not in os.environ
        return [int(arch.split("_")[1]) for arch in torch.cuda.get_arch_list()]

    old = SimpleNamespace(_get_cuda_arch_flags=read_as_torch_2_5)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    (finding,) = check_arch_flags(old)  # type: ignore[arg-type]
    assert finding.grade in ("note", "wrong") and "90a" in finding.found and not list(tmp_path.iterdir())
    (finding,) = check_arch_flags(old, mend=True)  # type: ignore[arg-type]
    assert finding.grade == "ok"
    # what was written works in a new Python, and does not win over the user's own value
    show = f"import os, site; site.addsitedir({str(tmp_path)!r}); print(os.environ['TORCH_CUDA_ARCH_LIST'])"
    for given, expected in (({}, "9.0"), ({"TORCH_CUDA_ARCH_LIST": "8.0"}, "8.0")):
        env = {"PATH": os.environ["PATH"], **given}
        done = subprocess.run([sys.executable, "-c", show], env=env, capture_output=True, text=True, timeout=30)
        assert done.stdout.strip() == expected, done.stderr


def test_the_script_refuses_what_it_does_not_know() -> None:
    """Before it touches anything."""
    for argv, message in (("nosuchfeature", "flashattention"), ("--nosuchflag", "--cuda"), ("--cuda 13", "cu130")):
        command = f"uv() {{ :; }}; export -f uv; bash setup_uv_env.sh {argv}"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 2 and message in done.stderr, argv
        assert not done.stdout


def copied_into_the_image() -> list[str]:
    """What Dockerfile copies before it installs."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split()[1:] for line in text.partition("setup_uv_env.sh --runtime")[0].splitlines()]
    copies = [words[:-1] for words, line in zip(lines, text.splitlines()) if line.startswith("COPY")]
    return [name for names in copies for name in names]


def test_both_containers_are_made_of_the_same() -> None:
    docker, apptainer = ((ROOT / name).read_text() for name in ("Dockerfile", "apptainer.def"))
    for pattern in (r"nvidia/cuda:\S+", r"uv==\S+", r"build-essential .*?(?=$| \\)", r"--cuda cu\d+"):
        assert re.findall(pattern, docker, re.MULTILINE)[0] == re.findall(pattern, apptainer, re.MULTILINE)[0], pattern
    files = apptainer.partition("%files\n")[2].partition("\n\n")[0].split("\n")
    copied = dict(line.split() for line in files)
    assert all(target == f"/deepy/{source}" and (ROOT / source).exists() for source, target in copied.items())
    missing = [name for name in copied_into_the_image() if name.split("/")[0] not in copied]
    assert not missing


def test_the_dockerfile_is_sound() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)
def test_uv_builds_the_environment_of_the_image(tmp_path: Path) -> None:
    """With uv from the package index: about a minute, most of it for compiling DeepSpeed and the index builders."""
    for name in copied_into_the_image():
        source, target = ROOT / name, tmp_path / "deepy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, target)
    drop = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in environment().items() if name not in drop}
    env |= {"VENV": str(tmp_path / "venv"), "PYTHON_VERSION": sys.executable}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    command = ["bash", str(tmp_path / "deepy/setup_uv_env.sh"), "--runtime"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\nready\n" in done.stdout and re.search(r"^ok +index builders +compiled", done.stdout, re.MULTILINE)
    # it is an environment of its own, and starts a command of the copied tree
    python = str(tmp_path / "venv/bin/python")
    call = {"cwd": tmp_path / "deepy", "env": env, "capture_output": True, "text": True, "timeout": 100}
    where = subprocess.run([python, "-c", "import megatron; print(megatron.__path__[0])"], **call)
    assert where.stdout.strip() == str(tmp_path / "deepy/megatron"), where.stderr
    assert subprocess.run([python, "deepy.py", "--help"], **call).returncode == 0
