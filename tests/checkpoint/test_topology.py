"""Saved at one layout, continued at another (known-faults 39), and one failing rank stops all (35)."""

import itertools
import os

import pytest
import torch

from megatron.checkpoint.attempt import SaveError
from megatron.checkpoint.find import list_checkpoints, open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.tensor_file import CheckedFile
from megatron.errors import UserError
from megatron.mpu.sharding import unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from tests.checkpoint.fake_engine import HEADS, HEADS_MHA, FakeEngine
from tests.distributed import run_distributed
from tests.distributed.client import RankFailure

pytestmark = pytest.mark.cpu

BEFORE, AFTER = 3, 2


def build(rank, layout, seed, heads, tied):
    pp, dp, tp = layout
    state = ParallelState.build(Topology({"pipe": pp, "data": dp, "model": tp}), rank, "cpu")
    return FakeEngine(state, seed, heads, tied)


def train_and_save(rank, world, root, layout, heads, tied):
    engine = build(rank, layout, 1, heads, tied)
    for _ in range(BEFORE):
        engine.step()
    save_checkpoint(root, BEFORE, engine, engine.state, heads=heads, consumed=24, client={}, config={})
    return sorted(os.listdir(f"{root}/global_step{BEFORE}"))


def load_and_train(rank, world, root, layout, heads, tied):
    """Returns {(name, tp rank): master weight} after some more steps."""
    engine = build(rank, layout, 99, heads, tied)
    opened = open_checkpoint(f"{root}/global_step{BEFORE}")
    load_checkpoint(opened, engine, engine.state, heads=heads)
    assert opened.manifest.consumed == 24
    for _ in range(AFTER):
        engine.step()
    return {(name, engine.state.tp_rank): master.detach() for name, master in engine.masters.items()}


def run(fn, root, layout, heads, tied):
    pp, dp, tp = layout
    return run_distributed(fn, pp * dp * tp, str(root), layout, heads, tied)


def expected(heads, tied):
    engine = FakeEngine(ParallelState.single(), 1, heads, tied)
    for _ in range(BEFORE + AFTER):
        engine.step()
    return {name: unshard([master.detach()], engine.specs[name]) for name, master in engine.masters.items()}


def joined(parts, layout, heads, tied):
    """Full weights from every rank's part; all copies of a part must be bit-equal."""
    tp = layout[2]
    found = {}
    for part in parts:
        for key, value in part.items():
            assert key not in found or torch.equal(found[key], value), key
            found[key] = value
    specs = FakeEngine(ParallelState(Topology({"pipe": 1, "data": 1, "model": tp}), 0, "cpu"), 1, heads, tied).specs
    return {name: unshard([found[name, rank] for rank in range(tp)], spec) for name, spec in specs.items()}


# (pipe, data, model)
SAVED_AT = [(1, 1, 2), (2, 2, 1), (1, 1, 1), (2, 1, 2)]
LOADED_AT = [(1, 2, 1), (2, 1, 1), (1, 1, 1), (1, 1, 2), (2, 1, 2)]


@pytest.mark.parametrize("saved_at", SAVED_AT, ids=str)
def test_any_layout_continues_any_other_bit_for_bit(tmp_path, saved_at):
    index = SAVED_AT.index(saved_at)
    heads, tied = [(HEADS, False), (HEADS_MHA, True), (HEADS_MHA, False), (HEADS, True)][index]
    files = run(train_and_save, tmp_path, saved_at, heads, tied)[0]
    assert len([name for name in files if name.startswith("rng_rank_")]) == saved_at[0] * saved_at[1] * saved_at[2]
    assert len([name for name in files if name.startswith("layer_00-")]) == saved_at[2]
    reference = expected(heads, tied)
    for layout in LOADED_AT:
        result = joined(run(load_and_train, tmp_path, layout, heads, tied), layout, heads, tied)
        for name, weight in reference.items():
            assert torch.equal(result[name], weight), (name, layout)


def fail_on_one_rank(rank, world, root, bad_rank, when):
    """Rank `bad_rank` fails in one phase; every rank reports what it raised."""
    engine = build(rank, (1, 2, 2), 1, HEADS, False)
    save_checkpoint(root, 1, engine, engine.state, heads=HEADS, consumed=8, client={}, config={})
    if rank == bad_rank:
        original, count = CheckedFile.write, itertools.count()

        def write(file, data):
            if next(count) == when:
                raise OSError(28, "No space left on device")
            return original(file, data)

        CheckedFile.write = write
    try:
        save_checkpoint(root, 2, engine, engine.state, heads=HEADS, consumed=16, client={}, config={})
    except SaveError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("bad_rank", "when"), [(0, 0), (3, 3), (2, 9)])
def test_one_failing_rank_stops_all_and_leaves_nothing(tmp_path, bad_rank, when):
    messages = run_distributed(fail_on_one_rank, 4, str(tmp_path), bad_rank, when)
    assert all(message and f"rank {bad_rank}" in message and "No space left" in message for message in messages)
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    assert list_checkpoints(tmp_path).latest == 1


def load_with_one_bad_rank(rank, world, root):
    engine = build(rank, (1, 2, 1), 99, HEADS, False)
    if rank == 1:
        del engine._params["2.mlp.linear1.weight"]
    try:
        load_checkpoint(open_checkpoint(f"{root}/global_step{BEFORE}"), engine, engine.state, heads=HEADS)
    except UserError as error:
        return str(error)
    return None


def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path):
    run(train_and_save, tmp_path, (1, 1, 1), HEADS, False)
    messages = run_distributed(load_with_one_bad_rank, 2, str(tmp_path))
    assert all(message and "2.mlp.linear1.weight" in message for message in messages)
    assert "rank 1" in messages[0]


def die_while_saving(rank, world, root):
    engine = build(rank, (1, 1, 2), 1, HEADS, False)
    save_checkpoint(root, 1, engine, engine.state, heads=HEADS, consumed=8, client={}, config={})
    if rank == 1:
        CheckedFile.write = lambda file, data: os._exit(9)
    save_checkpoint(root, 2, engine, engine.state, heads=HEADS, consumed=16, client={}, config={})


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path):
    with pytest.raises(RankFailure, match="rank 1"):
        run_distributed(die_while_saving, 2, str(tmp_path))
    listing = list_checkpoints(tmp_path)
    assert (listing.steps, listing.latest) == ((1,), 1)
    engine = FakeEngine(ParallelState.single(), 1)
    save_checkpoint(tmp_path, 2, engine, engine.state, heads=HEADS, consumed=16, client={}, config={})
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "global_step2", "latest"]
