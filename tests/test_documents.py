"""README and CONTRIBUTING speak of things that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import LEVELS

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
# These are named in a sentence under the picture of documentation/architecture.md.
BELOW_THE_CONFIG = [
    *(
        {"plugins"},
        {"rows"},
        {"registry"},
        {"log"},
        {"files", "checksums", "signals", "flags"},
        {"errors"},
        {"secrets", "streams", "home", "tables"},
    ),
]
# what a run makes, and the user's own files
MADE = re.compile(
    r"^(data|checkpoints|demo|ckpt|hf|global_step\S*|a\.\w+|b\.yml|mine\.yml|run\.yml|your\.yml|.*\.jsonl?|resolved\.yml)(/|$)"
)


def words(text: str) -> set[str]:
    """Everything in backticks or code blocks, split at blanks."""
    code = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    code += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {word.strip("(),:;") for part in code for word in part.split()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_the_text_exist(document: str) -> None:
    named = [
        word for word in words((ROOT / document).read_text()) if re.fullmatch(r"[\w./-]+\.(py|yml|md|sh|txt)", word)
    ]
    assert len(named) > 3
    folders = (ROOT, ROOT / "configs")
    missing = [
        word for word in named if not MADE.match(word) and not any((folder / word).exists() for folder in folders)
    ]
    assert not missing


def test_the_tour_is_numbered_and_short() -> None:
    """A newcomer reads it in an evening."""
    tour = (ROOT / "documentation" / "architecture.md").read_text().split("## Tour of the code")[1]
    files = re.findall(r"\b(\d+)\. `([\w./]+\.py)`", tour)
    assert [int(number) for number, _ in files] == list(range(1, len(files) + 1)) and len(files) > 15
    assert sum((ROOT / path).read_text().count("\n") for _, path in files) < 3200


def test_the_picture_of_the_layers_is_the_table_s() -> None:
    """documentation/architecture.md draws the levels of CONTRIBUTING.md's table, highest first."""
    picture = (ROOT / "documentation" / "architecture.md").read_text().split("```mermaid")[1].split("```")[0]
    boxes = re.findall(r"direction LR\n(.*)\n", picture)
    drawn = [set(re.findall(r"(\w+)\[", box)) for box in boxes]
    levels = LEVELS["megatron"]
    by_level = [{name for name, at in levels.items() if at == level} for level in range(max(levels.values()), -1, -1)]
    assert drawn == by_level[: len(drawn)]
    assert by_level[len(drawn) :] == BELOW_THE_CONFIG


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text()):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        path = ROOT / file if file else ROOT / document
        assert path.exists(), f"{document} links to {target}"
        headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if heading else []
        slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not heading or heading in slugs, f"{document} links to {target}, which has {sorted(slugs)}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_in_the_text_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)\b(?=`|\s+#|,|\s+[A-Z_]+=)", (ROOT / document).read_text()))
    assert named, document
    assert named <= targets


def test_make_help_lists_the_targets() -> None:
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    for target in ("venv", "demo", "demo-post", "test", "test-full", "test-cluster", "check", "docs", "clean"):
        assert re.search(rf"^  make {target} +\S", result.stdout, flags=re.MULTILINE), target


def test_scripts_are_sound_shell() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    scripts = [name for name in listed.stdout.splitlines() if name.endswith((".sh", ".sbatch")) or name == ".ci/run"]
    assert {".ci/run", "setup_uv_env.sh", "pretrain_neox.sbatch"} <= set(scripts)
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    checker = [found, "-x"] if found else ["bash", "-n"]  # the package has no wheel for Arm
    done = subprocess.run([*checker, *scripts], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_what_has_an_interpreter_line_can_be_executed() -> None:
    """`./deepy.py train.py ...` is GPT-NeoX's own first command. No other file is marked as a program."""
    below = [path for folder in ("tools", "huggingface", "slurm", "tests/gpu") for path in (ROOT / folder).rglob("*")]
    known = {path for path in (*ROOT.glob("*"), *below) if path.suffix in (".py", ".sh", ".sbatch")}
    programs = {path for path in known if path.read_bytes().startswith(b"#!")}
    assert {path for path in known if os.access(path, os.X_OK)} == programs
    assert {ROOT / name for name in ("deepy.py", "train.py", "eval.py", "generate.py")} <= programs
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # that of an active environment
    call = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["./deepy.py", "--help"], **call, check=True)
    assert "USER_SCRIPT" in done.stdout
