"""Data ranks share the work on a checkpoint: each writes and reads its part, and the bytes are those of one rank."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.pieces import File, deal
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.tensor_file import CheckedFile
from megatron.checkpoint.weights import save_weights
from megatron.mpu.sharding import shard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.training.engine_state import even_cut
from tests.checkpoint.fake_engine import HEADS, HEADS_MHA, FakeEngine, full_value, model_specs
from tests.distributed import run_distributed

pytestmark = pytest.mark.cpu

RANKS, DEPTH = 4, 16


class Contiguous(FakeEngine):
    """Each data rank keeps a piece of all parameters laid end to end, as ZeRO 1 and 2 do."""

    def share(self, name: str) -> range:
        total = sum(master.numel() for master in self.masters.values())
        before = 0
        for other, master in self.masters.items():
            if other == name:
                break
            before += master.numel()
        count = self.masters[name].numel()
        first, last = (total * (self.state.dp_rank + i) // self.state.dp_size - before for i in (0, 1))
        return range(max(0, min(first, count)), max(0, min(last, count)))


class Even(FakeEngine):
    """Each data rank keeps an equal part of every parameter."""

    def share(self, name: str) -> range:
        return even_cut(self.masters[name].numel(), self.state.dp_rank, self.state.dp_size)


# Rows are in the files as in memory, or head by head.
HEADS_OF = {FakeEngine: HEADS_MHA, Contiguous: HEADS_MHA, Even: HEADS}


def build(kind: type[FakeEngine], rank: int, seed: int, **sizes: int) -> FakeEngine:
    topology = Topology({"pipe": 1, "data": RANKS, "model": 1})
    state = ParallelState.build(topology, rank, "cpu") if rank >= 0 else ParallelState.single()
    return kind(state, seed, HEADS_OF[kind], **sizes)


def save(engine: FakeEngine, root: str) -> Path:
    state, heads = engine.state, HEADS_OF[type(engine)]
    return save_checkpoint(root, 2, engine, state, heads=heads, consumed=8, client={}, config={}, save_rng=False)


def save_and_count(rank: int, world: int, kind: type[FakeEngine], root: str) -> dict[str, int]:
    """Bytes and calls of this rank."""
    engine = build(kind, rank, seed=1, depth=DEPTH)
    for _ in range(2):
        engine.step()
    found = {"written": 0, "writes": 0, "received": 0, "alive": 0}
    write, receive, empty = CheckedFile.write, torch.distributed.irecv, torch.empty
    alive: set[int] = set()

    def counted_write(file: CheckedFile, data: Any) -> int:
        found["written"] += len(memoryview(data).cast("B"))
        found["writes"] += 1
        return write(file, data)

    def counted_receive(x: torch.Tensor, *more: Any, **named: Any) -> Any:
        found["received"] += x.nbytes
        return receive(x, *more, **named)

    def counted_empty(*shape: Any, **named: Any) -> torch.Tensor:
        x = empty(*shape, **named)
        if x.dtype == torch.float32:
            alive.add(id(x))
            weakref.finalize(x, alive.discard, id(x))
            found["alive"] = max(found["alive"], len(alive))
        return x

    with (
        mock.patch.object(CheckedFile, "write", counted_write),
        mock.patch.object(torch.distributed, "irecv", counted_receive),
        mock.patch.object(torch, "empty", counted_empty),
    ):
        save(engine, root)
    return found


@pytest.mark.parametrize("kind", [FakeEngine, Contiguous])
def test_four_ranks_write_a_quarter_each_and_the_bytes_of_one(tmp_path: Path, kind: type[FakeEngine]) -> None:
    """The time is that of the rank which writes most: its writes come one after the other."""
    alone = build(kind, -1, seed=1, depth=DEPTH)
    for _ in range(2):
        alone.step()
    with mock.patch.object(CheckedFile, "write", autospec=True, side_effect=CheckedFile.write) as write:
        expected = save(alone, str(tmp_path / "one"))
        calls = write.call_args_list
    counts = run_distributed(save_and_count, RANKS, kind, str(tmp_path / "four"))
    tensors = sorted(path.name for path in expected.glob("*layer_*"))
    assert len(tensors) == 2 * (DEPTH + 3)
    for name in tensors:
        assert (expected / name).read_bytes() == (tmp_path / "four" / "global_step2" / name).read_bytes(), name
    total = sum(path.stat().st_size for path in expected.glob("*layer_*"))
    written = [found["written"] for found in counts]
    assert max(written) < 0.3 * total and min(written) > 0.2 * total, written
    assert max(found["writes"] for found in counts) < 0.33 * len(calls)
    received = sum(found["received"] for found in counts)
    # What each rank has of a layer it keeps; contiguous pieces hardly move at all.
    assert received < (0.8 if kind is FakeEngine else 0.25) * total, received / total
    assert max(found["alive"] for found in counts) <= 2 * 3, (
        "weight and two moments of the parameter in hand and the next"
    )


def test_files_go_to_ranks_with_room_that_have_most_of_them() -> None:
    names = [File(f"{i}", ()) for i in range(8)]
    near = np.zeros((8, 4), np.int64)
    near[np.arange(8), [3, 3, 2, 2, 1, 1, 0, 0]] = 10
    near[0] *= 3
    dealt = [[file.name for file in files] for files in deal(names, list(near))]
    assert [sorted(files) for files in dealt] == [["6", "7"], ["4", "5"], ["1", "2"], ["0"]] or dealt[3] == ["0"]
    assert sorted(name for files in dealt for name in files) == [f"{i}" for i in range(8)]
    load = [sum(int(near[int(name)].sum()) for name in files) for files in dealt]
    assert max(load) == 30, "no rank has more than the largest file or its equal part"
    far = [np.array([size, 0]) for size in (5, 4, 3, 3, 1)]
    assert [[file.name for file in files] for files in deal(names[:5], far)] == [["0", "2"], ["1", "3", "4"]]
    assert deal([], []) == [[]]


class ReadBytes(TorchDispatchMode):
    """Counts what operations read of mapped tensors; views read nothing, and picking rows reads those."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped: list[torch.Tensor] = []  # kept, so that nothing else comes to lie there
        self.read = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        if (alias is None or alias.is_write) and func is not torch.ops.aten.new_zeros.default:
            for x in torch.utils._pytree.tree_leaves(args):
                if isinstance(x, torch.Tensor) and self._is_mapped(x):
                    self.read += min(x.nbytes, result.nbytes)
        return result

    def _is_mapped(self, x: torch.Tensor) -> bool:
        return any(m.data_ptr() <= x.data_ptr() < m.data_ptr() + m.nbytes for m in self.mapped)


def read_and_count(rank: int, world: int, kind: type[FakeEngine], root: str) -> dict[str, Any]:
    """Bytes of the mapped files that this rank reads, and the calls that ask for a file."""
    engine, reading = build(kind, rank, seed=9), ReadBytes()
    asked: list[str] = []
    load, is_file = torch.load, Path.is_file

    def opened(path: Path, **named: Any) -> Any:
        content = load(path, **named)
        if isinstance(path, Path):  # not what objects travel in
            asked.append(f"open {path.name}")
            reading.mapped += [x for x in torch.utils._pytree.tree_leaves(content) if isinstance(x, torch.Tensor)]
        return content

    def looked_at(path: Path) -> bool:
        asked.append(f"stat {path.name}")
        return is_file(path)

    checkpoint = open_checkpoint(f"{root}/global_step2")
    with mock.patch.object(torch, "load", opened), mock.patch.object(Path, "is_file", looked_at), reading:
        load_checkpoint(checkpoint, engine, engine.state, heads=HEADS_OF[kind], load_rng=False, checksums=False)
    state = {name: master.detach().clone() for name, master in engine.masters.items()}
    return {"read": reading.read, "asked": asked, "state": state}


@pytest.mark.parametrize("kind", [Even, Contiguous])
def test_four_ranks_read_a_quarter_each(tmp_path: Path, kind: type[FakeEngine]) -> None:
    alone = build(kind, -1, seed=1)
    alone.step()
    folder = save(alone, str(tmp_path))
    stored = [torch.load(path, weights_only=True) for path in folder.glob("optim_*")]
    total = sum(x.nbytes for x in torch.utils._pytree.tree_leaves(stored))
    found = run_distributed(read_and_count, RANKS, kind, str(tmp_path))
    read = [one["read"] for one in found]
    # Where rows are picked, whole ones are, and each piece may begin and end within one.
    assert max(read) < 0.3 * total and min(read) > 0.22 * total, np.array(read) / total
    for one in found:
        assert not any("layer" in call and "optim" not in call for call in one["asked"] if call.startswith("open"))
        for name, master in alone.masters.items():
            assert torch.equal(one["state"][name], master), name
    if kind is Contiguous:
        files = len(list(folder.iterdir()))
        for one in found:
            assert sum(call.startswith("stat") for call in one["asked"]) <= files / 2


@pytest.mark.parametrize("heads", [HEADS, HEADS_MHA], ids=["as in memory", "head by head"])
def test_a_share_of_another_cut_is_that_of_the_whole(tmp_path: Path, heads: Heads) -> None:
    """Rows are picked from the files of every rank that has some, whatever their order there."""
    for saved_tp in (1, 2, 4):
        specs = model_specs(saved_tp, heads)
        root = tmp_path / f"tp{saved_tp}"
        save_weights(
            root,
            1,
            [(spec, full_value(1, spec)) for spec in specs],
            tp_size=saved_tp,
            heads=heads,
            config={},
            dtype=torch.float32,
        )
        reader = CheckpointReader(open_checkpoint(root / "global_step1"))
        for tp in (1, 2, 4):
            for spec in model_specs(tp, heads):
                for rank in range(tp):
                    whole = shard(full_value(1, spec), spec, rank, tp).reshape(-1)
                    assert torch.equal(reader.local_weight(spec.name, spec, rank, tp).reshape(-1), whole)
                    for share in [even_cut(whole.numel(), part, 3) for part in range(3)] + [range(1, 2)]:
                        found = reader.local_weight(spec.name, spec, rank, tp, share)
                        assert torch.equal(found, whole[share.start : share.stop]), (spec.name, saved_tp, tp, share)
