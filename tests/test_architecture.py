"""The architecture holds: every rule of tests/architecture.py on our sources, and on sources that break it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import architecture
from tests.architecture import RULES, read_sources

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
SOURCES = read_sources(ROOT, "megatron", "tools", "huggingface")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_our_sources_keep_the_rule(rule: Callable) -> None:
    violations = [str(violation) for violation in rule(SOURCES)]
    assert not violations, "\n" + "\n".join(violations)


def test_the_sources_were_found() -> None:
    paths = {source.path for source in SOURCES}
    assert {"megatron/errors.py", "megatron/mpu/topology.py", "setup.py"} <= paths


def test_configuration_loads_without_torch() -> None:
    """The real thing, in a fresh interpreter: every module that promises to load without torch does."""
    names = [
        source.module
        for source in SOURCES
        if any(source.module == top or source.module.startswith(f"{top}.") for top in architecture.TORCH_FREE)
    ]
    assert len(names) > 5
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(sorted({{"torch", "deepspeed", "transformers"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_every_folder_of_tests_is_a_package() -> None:
    """Otherwise two files of one name clash, and functions cannot be sent to other processes by name."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_test_is_skipped_for_good() -> None:
    """`skipif` with a condition and the gpu marker are the only ways to skip."""
    pattern = re.compile(r"pytest\.mark\.(skip|xfail)\b(?!if)|unittest\.skip\(|pytest\.xfail\(")
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.name != Path(__file__).name:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                assert not pattern.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


# ---- each rule finds what it is for. A tree of files in, the expected "place: message" starts out.

BROKEN = {
    "layering: up": (
        "layering",
        {"megatron/mpu/state.py": "x = 1\nfrom megatron.model.gpt import y\n", "megatron/model/gpt.py": ""},
        ["megatron/mpu/state.py:2: mpu imports model, which is above it"],
    ),
    "layering: sideways, inside a function": (
        "layering",
        {"megatron/layers/a.py": "def f():\n    import megatron.optim.b\n", "megatron/optim/b.py": ""},
        ["megatron/layers/a.py:2: layers imports optim, which is next to it"],
    ),
    "layering: from megatron import": (
        "layering",
        {"megatron/optim/a.py": "from megatron import training\n", "megatron/training/__init__.py": ""},
        ["megatron/optim/a.py:1: optim imports training, which is above it"],
    ),
    "layering: relative": (
        "layering",
        {"megatron/optim/a.py": "from ..layers import mlp\n", "megatron/layers/mlp.py": ""},
        ["megatron/optim/a.py:1: optim imports layers, which is next to it"],
    ),
    "layering: by string": (
        "layering",
        {"megatron/optim/a.py": "import importlib\nm = importlib.import_module('megatron.plan.dry_run')\n"},
        ["megatron/optim/a.py:2: optim imports plan, which is above it"],
    ),
    "layering: layer 0 has an order": (
        "layering",
        {"megatron/errors.py": "from megatron.log import get_logger\n", "megatron/log.py": ""},
        ["megatron/errors.py:1: errors imports log, which is above it"],
    ),
    "layering: unknown package": (
        "layering",
        {"megatron/utils/a.py": "", "megatron/plan/b.py": "import megatron.helpers\n"},
        [
            "megatron/plan/b.py:1: megatron.helpers is not in the table of layers",
            "megatron/utils/a.py:1: megatron.utils is not in the table of layers",
        ],
    ),
    "layering: rooms": (
        "layering",
        {
            "megatron/data/tokens/a.py": "from megatron.data.order import mixture\n",
            "megatron/data/chat/b.py": "import megatron.data.order.mixture\n",
            "megatron/data/order/mixture.py": "from megatron.data.tokens import a\n",
            "megatron/data/attic.py": "",
        },
        [
            "megatron/data/attic.py:1: megatron.data.attic is not in the table of layers",
            "megatron/data/chat/b.py:1: chat imports order, which is next to it",
            "megatron/data/tokens/a.py:1: tokens imports order, which is above it",
        ],
    ),
    "outside the library": (
        "outside_imports",
        {"megatron/data/a.py": "from tools.datasets import corpora\n", "tools/datasets/corpora.py": ""},
        ["megatron/data/a.py:1: the library imports tools.datasets.corpora, which uses it"],
    ),
    "cycles: three modules, one link inside a function": (
        "cycles",
        {
            "megatron/data/a.py": "from megatron.data.b import x\n",
            "megatron/data/b.py": "\nfrom . import c\n",
            "megatron/data/c.py": "def f():\n    from megatron.data import a\n",
            "megatron/data/d.py": "from megatron.data import a\n",
        },
        ["megatron/data/a.py:1: import cycle: megatron.data.a, megatron.data.b, megatron.data.c"],
    ),
    "cycles: a name for the type checker is no link": (
        "cycles",
        {
            "megatron/data/a.py": "from megatron.data import b\n",
            "megatron/data/b.py": "import typing\nif typing.TYPE_CHECKING:\n    from megatron.data import a\n",
        },
        [],
    ),
    "deepspeed": (
        "deepspeed_places",
        {
            "megatron/layers/a.py": "def f():\n    from deepspeed.moe.layer import MoE\n",
            "megatron/training/engine_deepspeed.py": "import deepspeed\n",
            "train.py": "import deepspeed\n",
        },
        ["megatron/layers/a.py:2: deepspeed is imported", "train.py:1: deepspeed is imported"],
    ),
    "torch in the configuration, through another module": (
        "torch_free",
        {
            "megatron/neox_arguments/merge.py": "from megatron import registry\n",
            "megatron/registry.py": "\nfrom torch import nn\n",
            "megatron/mpu/state.py": "import torch\n",
        },
        ["megatron/registry.py:2: torch.nn where torch may not be needed"],
    ),
    "optional packages": (
        "optional_packages",
        {
            "megatron/layers/a.py": "try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n",
            "megatron/layers/b.py": "def f():\n    import flash_attn\n",
            "megatron/layers/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wandb\n",
            "tools/d.py": "class A:\n    import wandb\n",
        },
        ["megatron/layers/a.py:2: flash_attn is optional", "tools/d.py:2: wandb is optional"],
    ),
    "the whole configuration": (
        "whole_config",
        {
            "megatron/layers/a.py": "from megatron.neox_arguments.arguments import NeoXArgs\n",
            "megatron/training/b.py": "from megatron.neox_arguments.arguments import NeoXArgs\n",
        },
        ["megatron/layers/a.py:1: layers takes a config group"],
    ),
    "flat reading": (
        "flat_reading",
        {
            "megatron/run/a.py": "from megatron.neox_arguments import NeoXArgs\n"
            "def f(process, args: NeoXArgs):\n    return args.model.hidden_size, args.optimizer, process.args.seed\n",
            "megatron/data/b.py": "def f(args):\n    return args.seed\n",
        },
        ["megatron/run/a.py:3: process.args.seed"],
    ),
    "environment": (
        "environment",
        {
            "megatron/data/a.py": "import os\nx = os.environ.get('A')\n",
            "megatron/data/b.py": "from os import getenv\n",
            "megatron/cluster/c.py": "import os\nx = os.environ\n",
            "megatron/training/setup.py": "import os\nx = os.getenv('A')\n",
            "tools/d.py": "import os\nx = os.environ\n",
        },
        ["megatron/data/a.py:2: the environment", "megatron/data/b.py:1: the environment"],
    ),
    "global": (
        "global_statements",
        {"megatron/data/a.py": "X = 1\ndef f():\n    global X\n    X = 2\n"},
        ["megatron/data/a.py:3: global X"],
    ),
    "bare except": (
        "bare_excepts",
        {"tools/a.py": "try:\n    pass\nexcept:\n    pass\ntry:\n    pass\nexcept OSError:\n    pass\n"},
        ["tools/a.py:3: bare except"],
    ),
    "print": (
        "prints",
        {
            "megatron/data/a.py": "print('x')\n",
            "megatron/log.py": "print('x')\n",
            "megatron/inference/cli.py": "print('x')\n",
            "megatron/inference/generate_cli.py": "print('x')\n",
            "megatron/inference/incli.py": "print('x')\n",
            "tools/a.py": "print('x')\n",
            "train.py": "print('x')\n",
        },
        ["megatron/data/a.py:1: print", "megatron/inference/incli.py:1: print"],
    ),
    "unfinished": (
        "unfinished",
        {"megatron/data/a.py": "# TODO: more\nx = 'TODO'\ndef f():\n    raise NotImplementedError\n"},
        ["megatron/data/a.py:1: unfinished: # TODO: more", "megatron/data/a.py:4: NotImplementedError"],
    ),
    "entry points": (
        "entry_point_sizes",
        {"train.py": "x = 1\n" * 60, "eval.py": "x = 1\n" * 59, "tools/a.py": "x = 1\n" * 60},
        ["train.py:60: 60 lines"],
    ),
    "file sizes": (
        "file_sizes",
        {"tools/a.py": "x = 1\n" * 800, "tools/b.py": "x = 1\n" * 799},
        ["tools/a.py:800: 800 lines"],
    ),
    "used by tests only": (
        "used_by_tests_only",
        {
            "megatron/data/a.py": "LIMIT = 3\n\n\ndef used(): ...\n\n\n@NORMS.register('x')\nclass X: ...\n",
            "megatron/data/b.py": "from megatron.data.a import used\n\n\ndef unused(): ...\n",
        },
        ["megatron/data/a.py:1: LIMIT is used nowhere", "megatron/data/b.py:4: unused is used nowhere"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_rule_finds_what_breaks_it(case: str, tmp_path: Path) -> None:
    name, files, expected = BROKEN[case]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    found = sorted(
        str(violation) for violation in getattr(architecture, name)(read_sources(tmp_path, "megatron", "tools"))
    )
    assert len(found) == len(expected), found
    for violation, start in zip(found, expected, strict=True):
        assert violation.startswith(start)


def test_every_rule_is_broken_somewhere_above() -> None:
    assert {name for name, _, _ in BROKEN.values()} == {rule.__name__ for rule in RULES}


def test_good_sources_pass_every_rule(tmp_path: Path) -> None:
    files = {
        "megatron/errors.py": "class UserError(Exception): ...\n",
        "megatron/registry.py": "from megatron.errors import UserError\n",
        "megatron/mpu/state.py": "from megatron.registry import Registry\nfrom .topology import Topology\n",
        "megatron/mpu/topology.py": "import math\n",
        "megatron/model/gpt.py": "def build():\n    import megatron.mpu.state as state\n    return state\n",
        "train.py": "from megatron.model import gpt\n\ngpt.build()\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    sources = read_sources(tmp_path, "megatron")
    assert [str(violation) for rule in RULES for violation in rule(sources)] == []
