"""A resume opens the checkpoint once: rank 0 reads it, and what the other ranks need is sent to them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.checkpoint import neox_folder
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.plan.preflight import preflight
from tests.distributed import run_distributed
from tests.training.runs import KEYS, Faults, corpus, run, train
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu


class Reads:
    """Counts, in this process: `manifests` opened for reading, by folder; `kinds`: folders whose writer was asked for.

    Attributes hold {folder's name: times}. An audit hook cannot be removed, so `close` makes it blind.
    """

    def __init__(self) -> None:
        self.manifests: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self._open = True
        sys.addaudithook(self._hook)
        self._patches = [
            mock.patch.object(module, "is_neox_folder", self._ask)
            for name, module in list(sys.modules.items())
            if name.startswith("megatron.") and hasattr(module, "is_neox_folder")
        ]
        self._real = neox_folder.is_neox_folder
        for patch in self._patches:
            patch.start()

    def close(self) -> None:
        self._open = False
        for patch in self._patches:
            patch.stop()

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._open and event == "open" and arguments[1] in ("r", "rb"):
            path = Path(str(arguments[0]))
            if path.name == "manifest.json":
                self.manifests[path.parent.name] += 1

    def _ask(self, folder: Path) -> bool:
        self.kinds[Path(folder).name] += 1
        return self._real(folder)


def count_reads(rank: int, world: int, keys: dict[str, Any]) -> tuple[list[int], Counter[str], Counter[str]]:
    """(steps, manifests read, folders asked about) of one rank of a resumed run on two data ranks."""
    reads = Reads()
    report = train(rank, world, keys, Layout(dp=2), Faults())
    assert not report.error, report.error
    return report.steps, reads.manifests, reads.kinds


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a run that has saved steps 3 and 6 and is to take a seventh."""
    folder = tmp_path_factory.mktemp("run")
    keys = {"data_path": corpus(folder / "data"), "save": str(folder / "save"), "lr_decay_iters": 20}
    assert run(keys)[0].steps == [1, 2, 3, 4, 5, 6]
    return {**keys, "train_iters": 7}


def test_ranks_read_each_manifest_once_between_them(saved: dict[str, Any]) -> None:
    first, other = run_distributed(count_reads, 2, saved, timeout=110)
    assert first[0] == other[0] == [7]
    # At the start, and at the first save, which looks for temporary ones.
    assert first[1] == first[2] == {"global_step3": 2, "global_step6": 2}
    assert other[1] == other[2] == {}


def test_the_launcher_reads_each_manifest_once(saved: dict[str, Any]) -> None:
    keys = {**KEYS, **saved, **Layout().keys()}
    args = derive(NeoXArgs.from_saved(keys), Facts(num_devices=1))
    reads = Reads()
    try:
        preflight(args, "train")
    finally:
        reads.close()
    assert reads.manifests == reads.kinds == {path.name: 1 for path in Path(saved["save"]).glob("global_step*")}
