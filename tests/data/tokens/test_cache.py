"""The index cache under several processes, separate folders, damage, and folders that cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens import cache as caches
from megatron.data.tokens import cache_lock
from megatron.data.tokens.cache import IndexCache, IndexCaches, content_key, index_folder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.errors import MachineError, UserError
from tests.data.corpus import GOLDEN, write
from tests.data.packing_cases import packing

pytestmark = pytest.mark.cpu


def no_flock(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def build_slowly(folder: str, marks: str, locks: bool = True) -> list[int]:
    """Build (or wait for) one entry, leaving a mark when this process was the one that built."""
    if not locks:
        cache_lock.fcntl.flock = no_flock  # type: ignore[assignment]

    def build() -> dict[str, np.ndarray]:
        (Path(marks) / str(os.getpid())).touch()
        time.sleep(0.5)
        return {"x": np.arange(5)}

    return IndexCache(folder).arrays("race", "k" * 64, build)["x"].tolist()


def build_packed(prefix: str, folder: str) -> str:
    """What one node does: the digest that it would compare with the others."""
    packed = packing("packed", IndexedDataset(prefix), 8, cache=IndexCache(folder))
    return packed.dataset(packed.segments(6, 1234)).digest()


def build_forever(folder: str, locks: bool) -> None:
    """Build one entry without an end, leaving half a temporary folder; `building` says when."""
    if not locks:
        cache_lock.fcntl.flock = no_flock  # type: ignore[assignment]

    def build() -> dict[str, np.ndarray]:
        half = Path(folder) / f"race-{'k' * 32}.half.tmp"
        half.mkdir()
        (half / "x.npy").write_bytes(b"half")
        (Path(folder).parent / "building").touch()
        time.sleep(120)
        return {}

    IndexCache(folder).arrays("race", "k" * 64, build)


@pytest.mark.parametrize("locks", [True, False], ids=["flock", "without flock"])
def test_racing_processes_build_once(tmp_path: Path, locks: bool) -> None:
    (tmp_path / "marks").mkdir()
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        arguments = [(str(tmp_path / "cache"), str(tmp_path / "marks"), locks)] * 3
        results = pool.starmap_async(build_slowly, arguments, chunksize=1).get(timeout=60)
    assert results == [[0, 1, 2, 3, 4]] * 3
    assert len(list((tmp_path / "marks").iterdir())) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"race-{'k' * 32}"]


@pytest.mark.parametrize("locks", [True, False], ids=["flock", "without flock"])
def test_a_builder_killed_in_the_middle_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """kill -9 while it builds: the next process waits for nobody, takes over, and clears up what was left."""
    folder = tmp_path / "cache"
    builder = multiprocessing.get_context("spawn").Process(target=build_forever, args=(str(folder), locks))
    builder.start()
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "building").exists():
            assert time.monotonic() < until and builder.is_alive()
            time.sleep(0.02)
    finally:
        builder.kill()
        builder.join()
    if not locks:
        monkeypatch.setattr(cache_lock.fcntl, "flock", no_flock)
        monkeypatch.setattr(cache_lock, "SILENCE", 0.3)
    found = IndexCache(folder).arrays("race", "k" * 64, lambda: {"x": np.arange(4)})
    assert found["x"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in folder.iterdir()] == [f"race-{'k' * 32}"]


def test_without_flock_a_builder_is_dead_when_it_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts from touch to touch on the waiter's clock: however long a build takes, whatever the file says."""
    now = [0.0]
    monkeypatch.setattr(cache_lock.time, "monotonic", lambda: now[0])
    beat = tmp_path / "x.beat"
    watch, other = cache_lock._Watch(beat), cache_lock._Watch(beat)
    assert watch.acquire() and not other.acquire()
    for k in range(10):  # touched, by a machine whose clock is years off
        now[0] += cache_lock.SILENCE - 1
        os.utime(beat, (k + 1, k + 1))
        assert not other.acquire()
    now[0] += cache_lock.SILENCE - 1
    assert not other.acquire()
    now[0] += 2
    assert not other.acquire()  # found dead and removed now
    assert other.acquire() and not watch.acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["x.beat"]


def test_without_flock_the_holder_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_lock.fcntl, "flock", no_flock)
    monkeypatch.setattr(cache_lock, "BEAT", 0.01)
    seen: set[int] = set()
    with cache_lock.hold_lock(tmp_path / "x.lock", lambda: False, "x") as held:
        until = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < until:
            seen.add((tmp_path / "x.beat").stat().st_mtime_ns)
    assert held and len(seen) == 3
    assert not (tmp_path / "x.beat").exists()


def test_separate_folders_hold_the_same(tmp_path: Path) -> None:
    """Two nodes with their own disks build the same indices."""
    prefix = write(tmp_path / "x", GOLDEN)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        arguments = [(prefix, str(tmp_path / "a")), (prefix, str(tmp_path / "b"))]
        first, second = pool.starmap_async(build_packed, arguments, chunksize=1).get(timeout=60)
    assert first == second

    def content(folder: str) -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path / folder)): p.read_bytes() for p in (tmp_path / folder).rglob("*.npy")}

    assert len(content("a")) == 3
    assert content("a") == content("b")


def test_a_process_that_dies_while_building_leaves_the_way_free(tmp_path: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        IndexCache(tmp_path).arrays("x", "a" * 64, fail)
    found = IndexCache(tmp_path).arrays("x", "a" * 64, lambda: {"x": np.arange(3)})
    assert found["x"].tolist() == [0, 1, 2]
    assert isinstance(found["x"], np.memmap)


def test_damage_is_named(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays("x", "a" * 64, lambda: {"x": np.arange(300)})
    entry = tmp_path / f"x-{'a' * 32}"
    whole = (entry / "x.npy").read_bytes()
    (entry / "x.npy").write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"x-a+ is damaged.*Remove"):
        cache.arrays("x", "a" * 64, dict)
    (entry / "x.npy").write_bytes(whole)
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps({**meta, "key": "b" * 64}))
    with pytest.raises(UserError, match="x-a{32} .*[Rr]emove"):
        cache.arrays("x", "a" * 64, dict)


@pytest.mark.parametrize("room", [10, 4096], ids=["in the header", "in the numbers"])
def test_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, room: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(MachineError, match=r"x-a+: (File too large|.*disk is full).*data_cache_path") as told:
            IndexCache(tmp_path).arrays("x", "a" * 64, lambda: {"x": np.arange(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "None" not in str(told.value)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        found = IndexCache(tmp_path / "file" / "cache").arrays("x", "a" * 64, lambda: {"x": np.arange(3)})
    assert found["x"].tolist() == [0, 1, 2]
    assert "cannot be written" in caplog.text


def test_without_locks_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(cache_lock.fcntl, "flock", unsupported)
    assert IndexCache(tmp_path).arrays("x", "a" * 64, lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == [f"x-{'a' * 32}"]


def test_a_lost_answer_to_the_rename_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may report that the source is gone although the first try renamed it."""
    rename = os.rename

    def twice(source: str | Path, target: str | Path) -> None:
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(caches.os, "rename", twice)
    assert IndexCache(tmp_path).arrays("x", "a" * 64, lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]


def test_a_folder_that_refuses_the_files_only_when_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS with root squash says yes to access() and no to mkdir()."""

    def refused(**_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(caches.tempfile, "mkdtemp", refused)
    with caplog.at_level(logging.WARNING):
        found = IndexCache(tmp_path).arrays("x", "a" * 64, lambda: {"x": np.arange(3)})
    assert found["x"].tolist() == [0, 1, 2]
    assert "data_cache_path" in caplog.text


def test_entries_say_what_was_built_and_what_was_found(tmp_path: Path) -> None:
    caches_of_run = IndexCaches(tmp_path / "elsewhere")
    for prefix in ("a/x", "b/x", "a/x"):
        key = content_key({"prefix": prefix})
        caches_of_run.of(tmp_path / prefix).arrays("x", key, lambda: {"x": np.arange(3)})
    assert [entry.built for entry in caches_of_run.entries] == [True, True, False]
    assert [entry.bytes for entry in caches_of_run.entries] == [24] * 3
    assert {entry.path.parent for entry in caches_of_run.entries if entry.path} == {tmp_path / "elsewhere"}


def test_key_is_content() -> None:
    sizes = np.asarray([1, 2], np.int32)
    keys = {
        content_key({"seed": 1}, sizes),
        content_key({"seed": 2}, sizes),
        content_key({"seed": 1}, sizes[::-1]),
        content_key({"seed": 1}, sizes.astype(np.int64)),
        content_key({"seed": 1}, sizes, sizes),
    }
    assert len(keys) == 5
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})


def test_folder_next_to_the_data(tmp_path: Path) -> None:
    assert index_folder(tmp_path / "x") == tmp_path / "index_cache"
    assert index_folder(tmp_path / "x", shared=False).name == f"index_cache.{os.uname().nodename}"


def test_folder_elsewhere(tmp_path: Path) -> None:
    assert index_folder("/data/x", root=tmp_path) == tmp_path
    assert index_folder(tmp_path / "*" / "part-*.npy") == tmp_path / "index_cache"
    own = index_folder("/data/x", shared=False, root=tmp_path / "c")
    assert own == tmp_path / f"c.{os.uname().nodename}"


def test_neox_index_files_are_never_read(tmp_path: Path) -> None:
    """Known faults D3: `*_indexmap_*.npy` beside the data may be of other data, and is not what decides the order."""
    prefix = write(tmp_path / "x", GOLDEN)
    for array in ("doc_idx", "sample_idx", "shuffle_idx"):
        for name in ("x_train_0", "x_train"):
            np.save(tmp_path / f"{name}_indexmap_6ns_8sl_1234s_packedpi_{array}.npy", np.zeros(20, np.int32))
    packed = packing("packed", IndexedDataset(prefix), 8, cache=IndexCache(index_folder(prefix)))
    dataset = packed.dataset(packed.segments(6, 1234))
    assert dataset[0].tokens.tolist() == [10, 10, 10, 10, 20, 21, 22, 23, 24]  # the golden order
    assert dataset[3].tokens.tolist() == [7, 8, 9, 7, 8, 9, 40, 41, 42]


def test_a_changed_split_or_corpus_never_meets_old_indices(tmp_path: Path) -> None:
    """Known faults D3: the same prefix with other content, or another range, builds its own entry."""
    cache = IndexCache(tmp_path / "cache")

    def entries(documents: list[list[int]], used: tuple[int, int]) -> int:
        data = IndexedDataset(write(tmp_path / "x", documents))
        packed = packing("packed", data, 4, documents=used, cache=cache)
        packed.dataset(packed.segments(3, 1))
        return len(list((tmp_path / "cache").iterdir()))

    assert entries(GOLDEN, (0, 5)) == 1
    assert entries(GOLDEN, (0, 5)) == 1
    assert entries(GOLDEN, (0, 4)) == 2
    assert entries(GOLDEN[::-1], (0, 5)) == 3
