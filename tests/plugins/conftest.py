"""Plugins stay for the life of a process; here they are forgotten after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.helpers import remembered


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with remembered():
        yield
