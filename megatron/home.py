"""Where the files are that belong to Deepy and are no modules: scripts, configs, tools, sbatch files.

In a checkout they lie beside the package `megatron`; an installed Deepy has them in the folder `deepy_home` there, into
which setup.py puts them.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1]
"""The folder that the package `megatron` lies in: what Python has to search."""

HOME = LIBRARY / "deepy_home" if (LIBRARY / "deepy_home").is_dir() else LIBRARY
"""The folder of train.py, configs/, tools/, huggingface/, post-training/, slurm/ and the sbatch files."""


def version() -> str:
    """Deepy's version: of the installed package, else of the checkout."""
    try:
        return installed_version("deepy")
    except PackageNotFoundError:
        text = (LIBRARY / "pyproject.toml").read_text(encoding="utf-8")
        return re.findall(r'^version = "(.+)"', text, re.MULTILINE)[0]


def installs(feature: str) -> str:
    """The command, from any folder, that installs what a feature needs: `wandb`, ... (a file of requirements/)."""
    return f"pip install -r {HOME}/requirements/requirements-{feature}.txt"
