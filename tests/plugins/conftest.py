"""Plugins stay for the life of a process; here they are forgotten after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from megatron import plugins
from megatron.registry import ADDITIONS, withdraw


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    added, known, modules = len(ADDITIONS), dict(plugins._LOADED), set(sys.modules)
    yield
    withdraw(added)
    plugins._LOADED.clear()
    plugins._LOADED.update(known)
    for name in set(sys.modules) - modules:
        if name.startswith(("deepy_plugin_", "plug_")):
            del sys.modules[name]
