"""What is done at a layout to see a mutant: some steps, a resume at another layout, a step that is skipped, a text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.checkpoint.find import open_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.save import save_checkpoint
from megatron.inference.generate import Limits, generate
from megatron.inference.sampling import Sampling
from megatron.inference.stage import Stage
from tests.distributed import run_distributed
from tests.mutants.probe import Probe, Trace
from tests.mutants.registry import Patch
from tests.training.tiny import BATCH, SEQUENCE, Layout

Scenario = Callable[[int, dict[str, Any], Layout], Trace]
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [7, 1, 8, 2, 8])


def step(rank: int, keys: dict[str, Any], layout: Layout) -> Trace:
    """One step: the beginning of `steps`."""
    probe = Probe(rank, keys, layout)
    probe.step(0)
    return probe.trace


def steps(rank: int, keys: dict[str, Any], layout: Layout) -> Trace:
    """Two steps with an evaluation between them."""
    probe = Probe(rank, keys, layout)
    probe.step(0)
    probe.evaluate()
    probe.step(1)
    return probe.trace


def resumed(rank: int, keys: dict[str, Any], layout: Layout) -> Trace:
    """The third step, from a checkpoint that another layout and the other engine wrote after the second; on one rank
    without one."""
    if layout.world == 1:
        probe = Probe(rank, keys, layout)
        probe.train(0, 1)
        probe.start()
        probe.step(2)
        return probe.trace
    other = Layout(tp=2, dp=layout.world // 2) if layout.tp == 1 else Layout(dp=layout.world, zero=1)
    other = replace(other, engine="native" if layout.engine == "deepspeed" else "deepspeed")
    with tempfile.TemporaryDirectory() as root:
        root = _agreed(root)
        writer = Probe(rank, keys, other)
        writer.train(0, 1)
        heads, state = Heads.of(writer.args.model), writer.engine.state
        config = writer.args.to_dict()
        save_checkpoint(root, 2, writer.engine, state, heads=heads, consumed=2 * BATCH, client={}, config=config)
        reader = Probe(rank, keys, layout)
        load_checkpoint(open_checkpoint(f"{root}/global_step2"), reader.engine, reader.engine.state, heads=heads)
        dist.barrier()  # the folder goes with rank 0
    reader.start()
    reader.step(2)
    return reader.trace


def _agreed(value: str) -> str:
    """Rank 0's."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def overflow(rank: int, keys: dict[str, Any], layout: Layout) -> Trace:
    """Between two steps one in which one rank's part of one gradient is not finite."""
    probe = Probe(rank, keys, layout)
    probe.step(0)

    def spoil() -> None:
        if rank == layout.world - 1:
            gradients = probe.engine.grads()
            # Of a split parameter, so that no other rank has this entry.
            name = max(name for name in gradients if "mlp.linear1" in name)
            gradients[name].view(-1)[0] = torch.inf

    probe.engine.before_update = spoil
    probe.step(1)
    probe.engine.before_update = None
    probe.step(2)
    return probe.trace


def text(rank: int, keys: dict[str, Any], layout: Layout) -> Trace:
    """A few tokens behind prompts of different lengths, and their logits."""
    probe = Probe(rank, keys, layout)
    engine = probe.engine
    with engine.evaluating():
        hidden = probe.args.model.hidden_size
        stage = Stage(engine.stage_layers(), engine.state, hidden, torch.float32, SEQUENCE, forward=engine.run_stage)
        limits = Limits(maximum_tokens=4, start=0, ends=())
        found = generate(stage, [list(prompt) for prompt in PROMPTS], limits, Sampling(), return_logits=True)
    for number, completion in enumerate(found):
        probe.trace.outputs[f"tokens of text {number}"] = np.array(completion.tokens)
        if completion.logits:
            probe.trace.outputs[f"logits of text {number}"] = torch.stack(completion.logits).numpy()
    return probe.trace


SCENARIOS: dict[str, Scenario] = {one.__name__: one for one in (step, steps, resumed, overflow, text)}


def _on_a_rank(
    rank: int, world: int, runs: Sequence[tuple[str, Patch]], keys: dict[str, Any], layout: Layout
) -> list[Trace]:
    found = []
    for scenario, patch in runs:
        torch.manual_seed(0)
        with patch():
            found.append(SCENARIOS[scenario](rank, keys, layout))
    return found


def run(
    scenario: str, keys: dict[str, Any], layout: Layout, mutants: Sequence[tuple[str, Patch]] = ()
) -> list[list[Trace]]:
    """Each of the mutants in its scenario, and at last `scenario` with none, which shows that none has left anything
    behind: the traces of all ranks."""
    runs = [*mutants, (scenario, nullcontext)]
    ranks = run_distributed(_on_a_rank, layout.world, runs, keys, layout, timeout=110)
    return [list(traces) for traces in zip(*ranks, strict=True)]


def alone(scenario: str, keys: dict[str, Any], micro: int = BATCH) -> Trace:
    """The trace of one rank, without a patch."""
    return _alone(scenario, json.dumps(keys), micro)


@cache
def _alone(scenario: str, keys: str, micro: int) -> Trace:
    return run(scenario, json.loads(keys), Layout(micro=micro))[0][0]
