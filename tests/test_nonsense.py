"""Files with nonsense inside end in one message or in the fallback, never in a traceback.

Each kind of file that a program writes for itself is changed a few hundred times at random (seeded): bytes flipped,
cut, doubled; JSON values replaced by values of every other type. Whoever reads it may refuse it (`UserError`) or use
it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint import layout
from megatron.checkpoint import lock as lock_module
from megatron.checkpoint.compare import check_config
from megatron.checkpoint.find import find_checkpoint, list_checkpoints
from megatron.checkpoint.lock import SaveLock, refuse_if_held
from megatron.checkpoint.plain import read_plain
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.save import save_checkpoint
from megatron.cluster.status import StatusFile
from megatron.data.tokenise.chunks import Position
from megatron.data.tokenise.encode import Tally
from megatron.data.tokenise.journal import Journal
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import check_tokenizer, finalize_with_manifest
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import Group
from megatron.data.tokens.npy import NpyTokens
from megatron.data.tokens.verify import verify_path
from megatron.errors import UserError
from megatron.mpu.state import ParallelState
from megatron.tokenizer import create_tokenizer
from tests.checkpoint.fake_engine import HEADS, FakeEngine
from tests.checkpoint.starts import decide, put

pytestmark = pytest.mark.cpu

DIGITS = "@DIGITS@"  # becomes a number of 5000 digits
DEEP = "@DEEP@"  # becomes 20,000 nested lists
VALUES: list[Any] = [
    [],
    {},
    None,
    "x",
    "",
    -1,
    0,
    10**18,
    1.5,
    float("nan"),
    True,
    [None],
    [[1]],
    {"": []},
    DIGITS,
    DEEP,
]
BYTES = [b"", b"\xff\xfe\x00junk", b"[]", b"null", b"{}", b'"x"', b"1" * 5000, b"[" * 20_000, b"\x00" * 300]


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double or insert bytes, a few times."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, length = rng.randrange(len(changed) + 1), rng.choice([1, 4, 8, 40])
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length]
        else:
            changed[at : at + length] = rng.randbytes(length)
    return bytes(changed)


def change_json(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove or add values anywhere in a document."""
    document = json.loads(content)
    for _ in range(rng.choice([1, 1, 2])):
        nodes = list(containers(document))
        node = rng.choice(nodes)
        value = copy.deepcopy(rng.choice(VALUES))
        if isinstance(node, dict):
            key = rng.choice([*node, "unknown"]) if node else "unknown"
            if rng.random() < 0.2:
                node.pop(key, None)
            else:
                node[key] = value
        elif node:
            node[rng.randrange(len(node))] = value
    text = json.dumps(document).replace(f'"{DIGITS}"', "7" * 5000).replace(f'"{DEEP}"', "[" * 20_000 + "]" * 20_000)
    return text.encode()


def containers(document: Any) -> Iterator[Any]:
    if isinstance(document, (dict, list)):
        yield document
        for value in document.values() if isinstance(document, dict) else document:
            yield from containers(value)


def attack(path: Path, read: Callable[[], Any], times: int, *, as_json: bool = False) -> int:
    """Change `path` so many times and read it; returns how often it was refused."""
    whole, rng, refused = path.read_bytes(), random.Random(7), 0
    for number in range(times + len(BYTES)):
        change = change_json if as_json and rng.random() < 0.7 else change_bytes
        path.write_bytes(BYTES[number] if number < len(BYTES) else change(whole, rng))
        try:
            read()
        except UserError:
            refused += 1
    path.write_bytes(whole)
    return refused


@pytest.fixture
def save(tmp_path: Path) -> Path:
    for step in (2, 4):
        put(tmp_path / "save", step, hidden_size=32, lr=0.1, init_from=None)
    return tmp_path / "save"


def test_manifest_of_a_checkpoint(save: Path) -> None:
    """Resuming falls back to the older one, or uses what is left of the newest."""

    def read() -> None:
        start = decide(save)
        assert start.checkpoint is not None and start.step in (2, 4)
        check_config(start.checkpoint.manifest.config, {"hidden_size": 32}, path=save, allow=True)

    assert attack(save / "global_step4" / layout.MANIFEST, read, 300, as_json=True) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tensors and optimizer state."""
    engine = FakeEngine(ParallelState.single(), 1)
    engine.step()
    options = {"consumed": 8, "client": {"step": 1}, "config": {"hidden_size": 16}}
    return save_checkpoint(tmp_path_factory.mktemp("trained"), 1, engine, engine.state, heads=HEADS, **options)


def test_manifest_of_a_checkpoint_with_tensors(trained: Path) -> None:
    def read() -> None:
        reader = CheckpointReader(find_checkpoint(trained))
        for name in reader.names():
            reader.weight(name)
            reader.dtype(name)
        reader.optimizer_keys(name)

    assert attack(trained / layout.MANIFEST, read, 300, as_json=True) > 150


def test_files_of_torch(trained: Path) -> None:
    """With checksums any change is found before; without them, as what it is."""
    opened = find_checkpoint(trained)
    for name in (layout.state_file(0), layout.optimizer_file(2, 0)):
        attack(trained / name, lambda name=name: read_plain(trained / name), 200)
        attack(trained / name, lambda name=name: CheckpointReader(opened, checksums=False).load_file(name), 100)


def test_latest(save: Path) -> None:
    assert attack(save / layout.LATEST, lambda: list_checkpoints(save).choose(None, "load"), 100) == 0
    (save / layout.LATEST).write_text("global_step" + "9" * 5000)
    assert list_checkpoints(save).latest == 4


def test_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(lock_module, "SAVING_SECONDS", 0.0)
    path = tmp_path / layout.LOCK
    with SaveLock(tmp_path) as held:
        content = path.read_bytes()
    path.write_bytes(content)
    attack(path, lambda: refuse_if_held(tmp_path), 200, as_json=True)
    for pid, started in ((-1, 0), (0, None), (10**30, 0), (True, 0), ("1", "x"), (1, "x"), (1, [])):
        path.write_text(json.dumps({**json.loads(content), "pid": pid, "started": started}))
        with suppress(UserError):  # process 1 runs
            refuse_if_held(tmp_path)
    path.unlink()
    path.mkdir()
    for lock in (lambda: refuse_if_held(tmp_path), held.acquire):
        with pytest.raises(UserError, match=r"lock\.json is a folder"):
            lock()


def test_status(tmp_path: Path) -> None:
    status = StatusFile(tmp_path)
    status.write("running", 1, 2)
    assert attack(status.path, status.read, 100, as_json=True) == 0


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    prefix = tmp_path / "data"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in (3, 1, 7, 2, 30):
            builder.add_document(np.arange(length))
        tokenizer = create_tokenizer("CharLevelTokenizer").fingerprint()
        finalize_with_manifest(builder, tokenizer=tokenizer, source=["x"], extra={"eod": 0, "shard": None})
    return str(prefix)


def test_manifest_of_a_dataset(dataset: str, tmp_path: Path) -> None:
    tokenizer = create_tokenizer("CharLevelTokenizer")

    def read() -> None:
        data = IndexedDataset(dataset)
        verify_path(dataset)
        check_tokenizer(data, tokenizer)
        merge_groups([Group(str(tmp_path / "merged"), (dataset, dataset), shards=True)])

    assert attack(Path(f"{dataset}.manifest.json"), read, 200, as_json=True) > 100


def test_index(dataset: str) -> None:
    """What can be opened can be read: no item lies outside of the file."""
    lengths = [3, 1, 7, 2, 30]

    def read() -> None:
        data = IndexedDataset(dataset)
        assert [len(data.get(i)) for i in range(len(data))] == data.sizes.tolist()
        if data.sizes.tolist() != lengths:
            assert verify_path(dataset)[0].faults  # the manifest knows

    assert attack(Path(f"{dataset}.idx"), read, 300) > 150


def test_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([5, 1, 0, 7, 0] * 30, np.uint16))
    attack(tmp_path / "x.npy", lambda: NpyTokens(tmp_path / "x.npy", eod=0, dtype="uint16"), 300)


def test_journal_of_a_stopped_tokenisation(tmp_path: Path) -> None:
    prefix = str(tmp_path / "x")
    journal = Journal(prefix, {"files": ["a"]}, 1e-9)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([1, 2])
        assert list(journal.watch([(None, Position(0, 7, 1))]))
        journal.advance(Tally.zero(1), [builder])
        builder.close()

    def read() -> None:
        again = Journal(prefix, {"files": ["a"]}, 1.0)
        if again.saved is not None:
            again.read_counts(Tally)

    attack(journal.path, read, 200, as_json=True)
