"""Where the tests of whole commands run."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    """ "cuda", or "cpu" under DEEPY_GPU_TESTS_ON=cpu: a trial of a test's logic on a machine without a GPU."""
    return os.environ.get("DEEPY_GPU_TESTS_ON", "cuda")
