"""Settings of the whole suite: one thread per process, no accelerator, markers, the fork server under `--forked`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

# Before anything imports torch: many small processes on few cores are fastest with one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest

from megatron.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from tests.warm_python import WarmPython


def pytest_collection_finish(session: pytest.Session) -> None:
    """Under `--forked` each test runs in a child of the session: start the fork server here, so that all share one."""
    config = session.config
    if getattr(config.option, "forked", False) and not config.option.collectonly:
        uses_ranks = any("run_distributed" in vars(item.module) for item in session.items if hasattr(item, "module"))
        if uses_ranks:
            from tests.distributed.client import start_server

            start_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none (torch is only imported if such a test was collected).

    DEEPY_GPU_TESTS_ON=cpu runs those that take `device` (tests/gpu/conftest.py) on the CPU, which shows their logic.
    """
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if os.environ.get("DEEPY_GPU_TESTS_ON") == "cpu":
        gpu_tests = [item for item in gpu_tests if "device" not in getattr(item, "fixturenames", ())]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Commands as a user types them, each in a new process, which costs no seconds of imports."""
    from tests.warm_python import WarmPython

    with WarmPython(tmp_path_factory.mktemp("bin")) as warm:
        yield warm


_HANDLERS = {number: signal.getsignal(number) for number in STOP_SIGNALS}


def _heed_signals() -> None:
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _heeded_signals() -> Iterator[None]:
    """Undo what a command or a run in this process did to the stop signals: processes that a later test starts would
    inherit an ignored one, and never end by Ctrl-C."""
    _heed_signals()  # fixtures of a module run commands too
    yield
    _heed_signals()


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Undo what the code under test writes into the environment (`monkeypatch.delenv` of a missing name does not): a
    LOCAL_RANK that stays makes libraries of a later test look for a launcher."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _fresh_logger() -> Iterator[None]:
    """Undo what a test's in-process command did to our logger.

    pytest gives its own handlers to a logger that does not propagate when a test starts. Were it still so then, and
    propagated again inside the test, every message would be seen twice.
    """
    yield
    logger = logging.getLogger("deepy")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def pytest_sessionfinish() -> None:
    """Stop the fork server with the session rather than at interpreter exit, so that its end is inside the report."""
    client = sys.modules.get("tests.distributed.client")
    if client is not None:
        client.stop_server()
