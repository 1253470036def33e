"""What the machine has, found without torch."""

from __future__ import annotations

import socket
import struct
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.cluster import devices
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1),
        ({"DS_ACCELERATOR": "cpu"}, 0),
    ],
)
def test_gpus_are_those_that_cuda_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: int
) -> None:
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(devices, "_NVIDIA_PROC", tmp_path)
    assert devices.count_gpus(env) == expected


def test_no_driver_no_gpus_whatever_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_NVIDIA_PROC", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


def test_nvidia_smi_is_asked_where_the_driver_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: GPU-1)'\necho 'GPU 1: H100 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(devices, "_NVIDIA_PROC", tmp_path / "absent")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert devices.count_gpus({}) == 2
    tool.write_text("#!/bin/sh\necho 'driver not loaded'\nexit 9\n")
    assert devices.count_gpus({}) == 0


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1)])
def test_cores_respect_a_container_s_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(devices, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert devices.count_cores() == expected


def choose_only(port: int, connect_to: tuple[str, int] | None = None) -> int:
    """The port that the system chooses for a socket whose only choice is `port` (Linux 6.3: IP_LOCAL_PORT_RANGE)."""
    with socket.socket() as chooser:
        chooser.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        chooser.setsockopt(socket.IPPROTO_IP, 51, struct.pack("I", port << 16 | port))
        if connect_to:
            chooser.connect(connect_to)
        else:
            chooser.bind(("127.0.0.1", 0))
        return int(chooser.getsockname()[1])


def test_a_reserved_port_is_given_to_nobody_but_who_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        with devices.reserve_port(None) as port:
            for connect_to in (None, peer.getsockname()):
                with pytest.raises(OSError, match=r"already in use|Cannot assign"):
                    choose_only(port, connect_to)
            store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=20))
            store.set("key", "value")
            assert store.get("key") == b"value"
            del store
        assert choose_only(port) == port  # nothing else kept it


def test_a_port_that_cannot_be_used_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=str(port)), devices.reserve_port(port):
            pass
    with devices.reserve_port(port) as reserved:
        assert reserved == port
    with pytest.raises(UserError, match="not a port number"), devices.reserve_port(70000):
        pass
