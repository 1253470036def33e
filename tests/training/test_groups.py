"""Which process groups a training run makes: each set of ranks once, none for one rank but a process's own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.training.models import MODELS
from tests.training.tiny import Layout, build, step_batch

pytestmark = pytest.mark.cpu


def groups_made(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[list[Any], list[Any]]:
    """(ranks, back-end asked for) of every group made until a step is done; ranks of those that limits reach."""
    made, new_group = [], dist.new_group

    def noted(ranks=None, *arguments, **named):
        made.append((tuple(range(world) if ranks is None else ranks), named.get("backend")))
        return new_group(ranks, *arguments, **named)

    with mock.patch.object(dist, "new_group", noted):
        engine, args, lr = build(rank, keys, layout)
        engine.train_batch(step_batch(0, args, engine.state), lr(0))
    return made, [tuple(dist.get_process_group_ranks(group)) for group in engine.state.groups.values()]


def needed(layout: Layout, tied: bool) -> int:
    """How many groups of several ranks the layout needs, besides the world's: for each axis along which something is
    added up, world / size of them."""
    tp, pp, dp, ep, world = layout.tp, layout.pp, layout.dp, layout.ep, layout.world
    sizes = [tp, pp, dp, *([tp * pp] if tp > 1 and pp > 1 else []), *([ep, dp // ep] if 1 < ep < dp else [])]
    ends = world // pp if tied and pp > 2 else 0  # first and last stage share the embedding
    return sum(world // size for size in sizes if 1 < size < world) + ends


LAYOUTS = [
    ("neox", Layout(dp=2, zero=3), 0),
    ("neox", Layout(tp=2, dp=2, engine="native"), 4),
    ("neox", Layout(pp=2, dp=2), 4),
    ("moe", Layout(dp=4, ep=2, micro=1), 4),
    ("moe", Layout(dp=2, ep=2), 0),
    ("neox-tied", Layout(pp=3), 1),
]


@pytest.mark.parametrize(("model", "layout", "number"), LAYOUTS, ids=lambda value: getattr(value, "name", None))
def test_a_run_makes_the_groups_of_its_layout_once(model: str, layout: Layout, number: int) -> None:
    assert needed(layout, model == "neox-tied") == number
    keys = {**MODELS[model], "num_layers": max(2, layout.pp)}
    for rank, (made, limited) in enumerate(run_distributed(groups_made, layout.world, keys, layout)):
        everybody = tuple(range(layout.world))
        assert [ranks for ranks, backend in made if backend is not None] == [everybody]  # the host's
        on_device = [ranks for ranks, backend in made if backend is None]
        several = [ranks for ranks in on_device if len(ranks) > 1]
        assert len(several) == len(set(several)) == number and everybody not in several
        assert [ranks for ranks in on_device if len(ranks) == 1] == [(rank,)] * (layout.engine != "native")
        assert {ranks for ranks in several if rank in ranks} <= set(limited)
