"""State files read without torch: what torch.load gives, but for tensors; nothing is executed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.plain import StandIn, read_plain
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

CONTENT = {
    "iteration": 7,
    "client": {"callbacks": {"DataOrder": {"version": 2, "begun": [0, 3], "roles": {"train": None}}}},
    "text": "häßlich",
    "flags": (True, 1.5, -(2**40)),
    "ordered": OrderedDict(a=[1, 2]),
}


def test_plain_values_are_what_torch_reads(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "state.pt")
    assert read_plain(tmp_path / "state.pt") == torch.load(tmp_path / "state.pt", weights_only=True) == CONTENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_left_out(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {"scalar": torch.ones((), dtype=dtype), "weight": torch.nn.Parameter(torch.ones(3)), "after": 5}
    torch.save(values, tmp_path / "state.pt")
    found = read_plain(tmp_path / "state.pt")
    assert list(found) == ["scalar", "weight", "after"] and found["after"] == 5
    assert isinstance(found["scalar"], StandIn) and isinstance(found["weight"], StandIn)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "state.pt")
    with pytest.raises(UserError, match=r"state\.pt .*\bmkdir\b"):
        read_plain("state.pt")
    assert not Path("evil").exists()


def test_damaged_files(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "state.pt")
    content = (tmp_path / "state.pt").read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"not a checkpoint"):
        (tmp_path / "state.pt").write_bytes(damaged)
        with pytest.raises(UserError, match="The checkpoint is damaged"):
            read_plain(tmp_path / "state.pt")
    with pytest.raises(UserError, match="No such file"):
        read_plain(tmp_path / "nothing.pt")


def test_torch_is_not_imported(tmp_path: Path) -> None:
    torch.save(CONTENT | {"tensor": torch.ones(2)}, tmp_path / "state.pt")
    program = (
        "import sys; from megatron.checkpoint.plain import read_plain; "
        f"print(read_plain({str(tmp_path / 'state.pt')!r})['iteration'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["7", "False"]
