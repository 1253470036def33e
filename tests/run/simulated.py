"""One rank of a large job, alone in this process: torch's "fake" backend, and stand-ins that count what a rank asks of
what all ranks share: the file system, the rendezvous store, and the other ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.run import train as run_module
from megatron.training.setup import start_process
from megatron.training.trainer import Trainer

LOCAL = 4  # ranks of a node
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


@dataclass
class Shared:
    """What ranks give each other: keys of the store, and what rank 0 broadcasts, in order."""

    store: dict[str, bytes] = field(default_factory=dict)
    broadcasts: list[bytes] = field(default_factory=list)


@dataclass
class Asked:
    """What one rank asked for until its first step.

    Attributes:
        files: {"open data.bin": times} for what lies in the run's folder; "open", "stat" and "list".
        store: {"set deepy/config": times}; `store_bytes`: sent or received.
        groups: the members of each process group that it helped to make, in order.
        names: of those that it is a member of.
        messages: {"broadcast_object_list": times}; `message_bytes`: of objects, sent or received.
        seconds: of the processor.
    """

    files: Counter[str] = field(default_factory=Counter)
    store: Counter[str] = field(default_factory=Counter)
    store_bytes: int = 0
    groups: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)
    message_bytes: int = 0
    seconds: float = 0.0


class CountingStore:
    """A rendezvous store that answers from what earlier ranks have left."""

    def __init__(self, shared: Shared, asked: Asked) -> None:
        self.shared, self.asked = shared, asked

    def set(self, key: str, value: str) -> None:
        self.shared.store[key] = value.encode()
        self._count("set", key, len(value))

    def get(self, key: str) -> bytes:
        value = self.shared.store[key]
        self._count("get", key, len(value))
        return value

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys[0], sum(map(len, keys)))
        return all(key in self.shared.store for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self.shared.store[key] for key in keys]
        self._count("multi_get", keys[0], sum(map(len, values)))
        return values

    def delete_key(self, key: str) -> bool:
        self._count("delete", key, 0)
        return self.shared.store.pop(key, None) is not None

    def clone(self) -> CountingStore:
        return self

    def set_timeout(self, timeout: object) -> None:
        pass

    def _count(self, what: str, key: str, size: int) -> None:
        self.asked.store[f"{what} {key.rstrip('0123456789')}"] += 1
        self.asked.store_bytes += size


def start(_: int, __: int, rank: int, world: int, resolved: Path, shared: Shared) -> tuple[Asked, Shared]:
    """Start `train.py` as rank `rank` of `world`, until its first step would begin."""
    asked = Asked()
    root = str(resolved.parent)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % LOCAL), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(LOCAL))
    os.environ.update(DS_ACCELERATOR="cpu")
    with _counted_files(asked, root), _counted_messages(asked, shared, rank, world):
        began = time.process_time()
        process = start_process([], [], str(resolved))
        with mock.patch.object(Trainer, "run", lambda self: None):
            assert run_module.train(process) == 0
        asked.seconds = time.process_time() - began
    return asked, shared


@contextlib.contextmanager
def _counted_files(asked: Asked, root: str) -> Iterator[None]:
    """An audit hook cannot be removed, so it becomes blind."""
    counting = True

    def count(what: str, path: object) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(root):
            asked.files[f"{what} {os.path.relpath(path, root)}"] += 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if counting and event in ("open", "os.listdir", "os.scandir"):
            count("open" if event == "open" else "list", arguments[0])

    def watched(real: Any) -> Any:
        def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
            count("stat", path)
            return real(path, *args, **kwargs)

        return stat

    sys.addaudithook(hook)
    with mock.patch.object(os, "stat", watched(os.stat)), mock.patch.object(os, "lstat", watched(os.lstat)):
        yield
    counting = False


@contextlib.contextmanager
def _counted_messages(asked: Asked, shared: Shared, rank: int, world: int) -> Iterator[None]:
    """Other ranks hold what this one does, and rank 0 has sent what it sent."""
    init, new_group, place = dist.init_process_group, dist.new_group, iter(list(shared.broadcasts))
    members = range(world)

    def host(rank: int) -> str:
        return f"node{rank // LOCAL}"

    def join(backend: str, store: Any, rank: int, world_size: int, timeout: object) -> None:
        assert world_size == world
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def make(ranks: Any = None, timeout: object = None, backend: object = None, **more: Any) -> Any:
        asked.groups.append(tuple(ranks) if ranks is not None else tuple(members))
        made = new_group(ranks, backend="fake", **more)
        if rank in asked.groups[-1]:
            asked.names.append(made.group_name)
        return made

    def counted(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            asked.messages[name] += 1
            return real(*args, **kwargs)

        return call

    def note(name: str, box: list[Any]) -> None:
        asked.messages[name] += 1
        asked.message_bytes += len(pickle.dumps(box))

    def broadcast(box: list[Any], src: int = 0, group: object = None, **more: Any) -> None:
        if src != 0 or (group is not None and dist.get_world_size(group) != world):
            return
        if rank == 0:
            shared.broadcasts.append(pickle.dumps(box))
        else:
            box[:] = pickle.loads(next(place))
        note("broadcast_object_list", box)

    def gather(box: list[Any], value: Any, group: object = None) -> None:
        note("all_gather_object", [value])
        box[:] = [host(other) for other in range(world)] if value == host(rank) else [value] * len(box)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(socket, "gethostname", lambda: host(rank)))
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, counted(name)))
        for name, stand_in in (
            ("TCPStore", lambda *args, **kwargs: CountingStore(shared, asked)),
            ("init_process_group", join),
            ("new_group", make),
            ("broadcast_object_list", broadcast),
            ("all_gather_object", gather),
        ):
            patches.enter_context(mock.patch.object(dist, name, stand_in))
        yield
