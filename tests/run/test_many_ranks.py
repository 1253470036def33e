"""A start on 1,024 ranks, one rank at a time in a process of its own: what a rank asks of the file system, the store
and the others does not grow with their number; only rank 0, and the first rank of a machine, look at the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from tests.distributed import run_distributed
from tests.run.simulated import LOCAL, Asked, Shared, start
from tests.training.runs import KEYS, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

WORLD = 1024
SOURCES = 3
DENSE = {**KEYS, "num_attention_heads": 8, "num_kv_heads": 8, "num_layers": 8}
MOE = {**KEYS, "moe_num_experts": 8, "moe_top_k": 2}
OBJECTS = ("all_gather_object", "broadcast_object_list")
# With the number of process groups: that of the world for the host, one of a single rank for DeepSpeed, and those of
# tp; dp, unless it is the world; pp; pp and tp; tied weights; ranks that share experts, and that have the same.
LAYOUTS = {
    "dp": (KEYS, Layout(dp=WORLD, micro=1), 2),
    "tp-pp-dp": (DENSE, Layout(tp=8, pp=8, dp=16, micro=1), 1 + 128 + 64 + 128 + 16 + 128),
    "ep": (MOE, Layout(dp=WORLD, ep=8, micro=1), 2 + 128 + 8),
}
SMALL = Layout(dp=8, micro=1)


RANKS = [0, 1, LOCAL, WORLD - 1]  # the second rank of a machine, the first of another, the last of all


def config(folder: Path, keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a run in `folder`, with its data."""
    (folder / "data").mkdir(exist_ok=True)
    paths = [corpus(folder / "data" / str(number), seed=number) for number in range(SOURCES)]
    data = {"train_data_paths": paths, "split": None, "save": str(folder / "save"), "lr_decay_iters": 20}
    return {**keys, **data}


def begin(folder: Path, keys: dict[str, Any], layout: Layout, ranks: list[int]) -> list[Asked]:
    """What each of `ranks` asks for at a start; the first of them is rank 0."""
    keys = {**keys, **layout.keys(), "train_batch_size": layout.dp, "train_iters": 8}
    args = derive(NeoXArgs.from_saved(keys), Facts(num_devices=layout.world))
    (folder / "resolved").write_text(args.to_resolved())
    shared, found = Shared(), []
    for rank in ranks:
        ((asked, shared),) = run_distributed(start, 1, rank, layout.world, folder / "resolved", shared, backend=None)
        found.append(asked)
    return found


def looked_at(asked: Asked, under: str = "") -> Counter[str]:
    """{"data/0/text_document.bin": operations} on what lies in the run's folder."""
    found: Counter[str] = Counter()
    for what, times in asked.files.items():
        if (name := what.split(" ", 1)[1]).startswith(under):
            found[name] += times
    return found


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_rank_is_in_one_group_of_each_kind(case: str) -> None:
    layout = LAYOUTS[case][1]
    topology = Topology({"pipe": layout.pp, "data": layout.dp, "model": layout.tp})
    orders = set()
    for rank in range(0, WORLD, 31):
        made: list[tuple[int, ...]] = []

        def make(
            ranks: Any = None, timeout: object = None, backend: object = None, into: Any = made
        ) -> tuple[int, ...]:
            into.append(tuple(ranks or range(WORLD)))
            return into[-1]

        with mock.patch.object(dist, "new_group", make), mock.patch.object(dist, "get_world_size", lambda: WORLD):
            state = ParallelState.build(topology, rank, "cpu", ep_size=layout.ep)
        assert all(rank in group for group in state.groups.values())
        kinds = set(state.groups.values()) | {state.host}
        times = Counter(member for group in set(made) for member in group)
        assert set(times.values()) == {len(kinds)}, "every rank is in one group of each kind"
        orders.add(hash(tuple(made)))
    assert len(orders) == 1, "a rank that makes groups in another order hangs the job"


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_start_looks_at_the_data_once_and_once_per_machine(tmp_path: Path, case: str) -> None:
    keys, layout, groups = LAYOUTS[case]
    first, second, leader, last = begin(tmp_path, config(tmp_path, keys), layout, RANKS)
    assert looked_at(second) == looked_at(last) == Counter()
    files = {f"data/{number}/text_document.{kind}": 3 for number in range(SOURCES) for kind in ("bin", "idx")}
    assert looked_at(leader) == files
    for asked in (first, second, leader, last):
        assert len(asked.groups) == groups
        assert len(asked.names) == len(set(asked.names)) <= 6
        assert asked.store.total() == 1
        assert {name: asked.messages[name] for name in OBJECTS} == {"all_gather_object": 2, "broadcast_object_list": 2}
        assert asked.messages.total() < 40 and asked.message_bytes < 10_000
    if case == "dp":
        for more, less in zip((first, second), begin(tmp_path, config(tmp_path, keys), SMALL, [0, 1]), strict=True):
            assert more.messages == less.messages, "as many messages on 1,024 ranks as on 8"
            assert more.message_bytes <= less.message_bytes + 100


def test_a_resume_opens_what_a_rank_reads(tmp_path: Path) -> None:
    """Weights and optimizer state of ten layers, dealt out to more ranks than there are files."""
    keys = config(tmp_path, {**KEYS, "num_layers": 8, "precision": "bfloat16"})
    assert run({**keys, "train_iters": 3}, Layout(zero=1))[0].steps == [1, 2, 3]
    first, second, leader, last = begin(tmp_path, keys, Layout(dp=WORLD, micro=1, zero=1), RANKS)
    assert sum(looked_at(first, "save/global_step3").values()) > 50
    for asked in (second, leader, last):
        found = looked_at(asked, "save")
        assert len([name for name in found if "layer_" in name]) <= 4, "of two layers at most"
        assert not [what for what in asked.files if what.startswith("list") or what.endswith("manifest.json")]
        assert sum(found.values()) <= 16
        assert {name: asked.messages[name] for name in OBJECTS} == {"all_gather_object": 4, "broadcast_object_list": 2}
        assert asked.message_bytes < 50_000
