"""The requirement files: exact, in agreement with pyproject.toml, and complete for what the code imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
# Names of GPT-NeoX for which nothing is needed here: `pip install -r` of them works, and a comment says why.
NOTHING = {"apex-pip", "moe", "onebitadam", "sparseattention"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# module name -> distribution name, where they differ
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "flash_attn": "flash-attn",
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "lm_eval": "lm-eval",
    "huggingface_hub": "huggingface-hub",
}
# imported but not listed: dependencies of listed packages
UNLISTED = {"triton", "pyarrow", "packaging", "botocore"}


def requirements(path: Path) -> list[Requirement]:
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-r")]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned_version(path: Path, name: str, python: str) -> str | None:
    """The one version that `path` asks for on that Python, or None."""
    matches = [
        requirement
        for requirement in requirements(path)
        if canonicalize_name(requirement.name) == name
        and (requirement.marker is None or requirement.marker.evaluate({"python_version": python}))
    ]
    assert len(matches) <= 1, f"{path.name}: {name} is listed twice for Python {python}"
    return str(matches[0].specifier).removeprefix("==") if matches else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_line_is_one_exact_version(path: Path) -> None:
    if path.stem.removeprefix("requirements-") in NOTHING:
        assert not requirements(path) and path.read_text().startswith("# Nothing")
    else:
        assert requirements(path)
    for requirement in requirements(path):
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), f"{path.name}: {requirement} is not an exact pin"
        assert "+" not in str(requirement.specifier), f"{path.name}: {requirement} is a build for one kind of machine"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_included_files_exist(path: Path) -> None:
    for name in re.findall(r"^-r\s+(\S+)", path.read_text(), flags=re.MULTILINE):
        assert (path.parent / name).is_file(), f"{path.name} includes {name}, which does not exist"


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_agree_with_pyproject(python: str) -> None:
    for line in project()["project"]["dependencies"]:
        wanted = Requirement(line)
        version = pinned_version(ROOT / "requirements/requirements.txt", canonicalize_name(wanted.name), python)
        assert version, f"pyproject.toml needs {wanted.name}, requirements.txt does not list it for Python {python}"
        assert wanted.specifier.contains(version), f"requirements.txt pins {wanted.name} {version}, pyproject: {wanted}"


def test_build_requirements_are_pinned_too() -> None:
    for line in project()["build-system"]["requires"]:
        wanted = Requirement(line)
        version = pinned_version(ROOT / "requirements/requirements.txt", canonicalize_name(wanted.name), "3.11")
        assert version, f"the build needs {wanted.name}, requirements.txt does not list it"
        assert wanted.specifier.contains(version)


def test_one_version_per_package_over_all_files() -> None:
    for python in PYTHONS:
        versions: dict[str, set[str]] = {}
        for path in FILES:
            for requirement in requirements(path):
                name = canonicalize_name(requirement.name)
                version = pinned_version(path, name, python)
                versions.setdefault(name, set()).update({version} if version else set())
        clashes = {name: found for name, found in versions.items() if len(found) > 1}
        assert not clashes


def test_apex_is_never_listed() -> None:
    """The name belongs to another project on the package index; NVIDIA's is installed by hand."""
    names = {canonicalize_name(requirement.name) for path in FILES for requirement in requirements(path)}
    assert "apex" not in names and "nvidia-apex" not in names
    assert len(names) > 20


def imported_modules(folder: Path) -> dict[str, str]:
    """Third-party top-level module -> a place that imports it, over all Python files under `folder`."""
    found: dict[str, str] = {}
    own = {"megatron", "tests", "tools", "deepy", "train"} | {path.stem for path in ROOT.glob("*.py")}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in own:
                    found.setdefault(top, f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_third_party_import_of_the_library_is_listed() -> None:
    names = {canonicalize_name(requirement.name) for path in FILES for requirement in requirements(path)}
    found = imported_modules(ROOT / "megatron")
    assert "torch" in found and "yaml" in found
    missing = {
        module: place
        for module, place in found.items()
        if module not in UNLISTED and canonicalize_name(DISTRIBUTIONS.get(module, module)) not in names
    }
    assert not missing, f"imported but in no requirements file: {missing}"
