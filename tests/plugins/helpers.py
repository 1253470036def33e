"""The examples of documentation/plugins.md as files, and small plugins."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron import plugins
from megatron.registry import ADDITIONS, withdraw

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "documentation" / "plugins.md"

NORM = """\
from megatron.layers.norms.rmsnorm import NORMS, RMSNorm


@NORMS.register("{name}")
class Plugged(RMSNorm):
    pass
"""


@contextmanager
def remembered() -> Iterator[None]:
    """Forget afterwards which plugins were loaded meanwhile, as a new process would."""
    added, known, modules = len(ADDITIONS), dict(plugins._LOADED), set(sys.modules)
    try:
        yield
    finally:
        withdraw(added)
        plugins._LOADED.clear()
        plugins._LOADED.update(known)
        for name in set(sys.modules) - modules:
            if name.startswith(("deepy_plugin_", "plug_")):
                del sys.modules[name]


def blocks(language: str) -> list[str]:
    """The code blocks of the guide in that language."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)


def write_layers(folder: Path) -> Path:
    """The first example: my_layers.py and its config my_run.yml."""
    (folder / "my_layers.py").write_text(blocks("python")[0], encoding="utf-8")
    config = folder / "my_run.yml"
    config.write_text(blocks("yaml")[0], encoding="utf-8")
    return config


def write_family(folder: Path) -> Path:
    """The second example, my_family.py."""
    path = folder / "my_family.py"
    path.write_text(blocks("python")[1], encoding="utf-8")
    return path


def write_switch(folder: Path) -> Path:
    """The third example, my_switch.py."""
    path = folder / "my_switch.py"
    path.write_text(blocks("python")[2], encoding="utf-8")
    return path


def write_metric(folder: Path) -> Path:
    """The fourth example, my_metric.py; its config is the guide's second."""
    path = folder / "my_metric.py"
    path.write_text(blocks("python")[3], encoding="utf-8")
    return path


def save_starcoder2(folder: Path) -> None:
    """A random model of that family, as transformers saves it."""
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    torch.manual_seed(0)
    config = Starcoder2Config(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, sliding_window=9,
        bos_token_id=0, eos_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = Starcoder2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def write_norm(path: Path, name: str) -> Path:
    """A plugin that registers a norm."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NORM.format(name=name), encoding="utf-8")
    return path


def write_config(path: Path, **keys: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
    return str(path)
