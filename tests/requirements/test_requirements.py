"""The requirement files: exact, in agreement with pyproject.toml, and complete for what the code imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
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
    "mkdocs": "mkdocs-material",
}
# comes with torch; by hand, under the name of no package; what a benchmark compares with, in an environment of its own
UNLISTED = {"triton", "flash_attn_interface", "litgpt", "nanochat"}
# extra of the package -> file in requirements/, where the names differ
FILE_OF = {"fast": "fast-tokenizers", "te": "transformerengine", "flash": "flashattention"}


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


def names_of(lines: Iterable[str]) -> dict[str, Requirement]:
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


def extras() -> dict[str, dict[str, Requirement]]:
    """Of each extra what it needs; `all` is made of the others."""
    found = project()["project"]["optional-dependencies"]
    return {extra: names_of(lines) for extra, lines in found.items() if extra != "all"}


def test_extras_are_the_files_of_features() -> None:
    """One feature, one set of packages, whether it is asked for by an extra or by GPT-NeoX's way of a file."""
    assert extras()["post"] == {}  # built in
    features = {extra: FILE_OF.get(extra, extra) for extra in extras() if extra != "post"}
    files = {path.stem.removeprefix("requirements-") for path in FILES} - {"requirements", "dev"} - NOTHING
    assert set(features.values()) == files
    for extra, feature in features.items():
        path = ROOT / f"requirements/requirements-{feature}.txt"
        assert {canonicalize_name(one.name) for one in requirements(path)} == set(extras()[extra]), extra
        for name, wanted in extras()[extra].items():
            for python in PYTHONS:
                version = pinned_version(path, name, python)
                assert version and wanted.specifier.contains(version), f"{path.name}: {name} {version}; {wanted}"


def test_all_is_every_extra_that_needs_no_compiler() -> None:
    (whole,) = project()["project"]["optional-dependencies"]["all"]
    assert Requirement(whole).name == "deepy"
    assert Requirement(whole).extras == set(extras()) - {"te", "flash", "mamba"}


def test_requirements_txt_is_what_the_package_needs_and_evaluation() -> None:
    listed = {canonicalize_name(one.name) for one in requirements(ROOT / "requirements/requirements.txt")}
    build = names_of(project()["build-system"]["requires"])
    assert listed == {*names_of(project()["project"]["dependencies"]), *extras()["eval"], *build}


def imported_modules(paths: Iterable[Path]) -> dict[str, str]:
    """Third-party top-level module -> a place that imports it, over Python files."""
    found: dict[str, str] = {}
    own = {"megatron", "tests", "tools"} | {path.stem for path in [*ROOT.glob("*.py"), *ROOT.glob("tools/bench/*.py")]}
    for path in sorted(paths):
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


def test_every_import_is_declared() -> None:
    """By the package for the library and what the wheel carries; benchmarks and the site may use what is for dev."""
    declared = {*names_of(project()["project"]["dependencies"])}.union(*extras().values())
    development = {canonicalize_name(one.name) for one in requirements(ROOT / "requirements/requirements-dev.txt")}
    folders = ("megatron", "tools", "huggingface", "post-training", "slurm")
    paths = {path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")} | {*ROOT.glob("*.py")}
    ours = {
        path for path in paths if path.parent.name == "bench" or path.name in ("site.py", "pictures.py", "setup.py")
    }
    for some, names in ((paths - ours, declared), (ours, declared | development | {"pybind11", "setuptools"})):
        found = imported_modules(some)
        assert "torch" in found
        missing = {
            module: place
            for module, place in found.items()
            if module not in UNLISTED and canonicalize_name(DISTRIBUTIONS.get(module, module)) not in names
        }
        assert not missing, f"imported but not declared in pyproject.toml: {missing}"
