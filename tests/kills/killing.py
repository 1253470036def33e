"""Runs whose ranks get SIGKILL at random moments, again and again, and what is left in the end.

A moment is a time after the start (in setup, loading, steps, anything), or a time after the begin of a checkpoint, up
to twice what one takes: in its files, its manifest, its renaming, or in a writer that goes on behind the loop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from megatron.callbacks.checkpointer import Checkpointer
from tests.distributed import RankFailure, run_distributed
from tests.training.runs import Faults, Report, train
from tests.training.tiny import Layout

STEPS, FACTOR = 8, 2
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}  # random states have to survive as well
KEYS = {"train_iters": STEPS, "checkpoint_factor": FACTOR, "keep_last_n_checkpoints": 2, **DROPOUT}


@dataclass(frozen=True)
class Kill:
    """SIGKILL to `ranks`, `after` seconds from the start, or from the begin of the `save`-th checkpoint (1 or more)."""

    ranks: tuple[int, ...]
    after: float
    save: int | None = None


@dataclass(frozen=True)
class Straight:
    """A run that nobody disturbs: the report of each rank, and how long rank 0 took, for all and for a checkpoint."""

    reports: list[Report]
    seconds: float
    save_seconds: float


def killed(
    rank: int, world: int, keys: dict[str, Any], layout: Layout, kill: Kill | None
) -> tuple[Report, float, list[float]]:
    """One rank: its report, the seconds that it took, and those of each checkpoint."""

    timers: list[threading.Timer] = []

    def arm() -> None:
        assert kill is not None
        timer = threading.Timer(kill.after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        timers.append(timer)

    hit = kill is not None and rank in kill.ranks
    save, saves, begun = Checkpointer.save, [], 0

    def timed(self: Checkpointer, trainer: Any, **options: Any) -> None:
        nonlocal begun
        begun += 1
        if hit and kill is not None and kill.save == begun:
            arm()
        started = time.monotonic()
        save(self, trainer, **options)
        saves.append(time.monotonic() - started)

    if hit and kill is not None and kill.save is None:
        arm()
    started = time.monotonic()
    with mock.patch.object(Checkpointer, "save", timed):
        report = train(rank, world, keys, layout, Faults())
    for timer in timers:
        timer.cancel()  # the run has ended: what is left is the test's
    return report, time.monotonic() - started, saves


def undisturbed(keys: dict[str, Any], layout: Layout, folder: Path) -> Straight:
    """The reference for `survive`, saved into `folder`."""
    found = run_distributed(killed, layout.world, {**KEYS, **keys, "save": str(folder)}, layout, None, timeout=110)
    reports = [report for report, *_ in found]
    assert all(report.steps == list(range(1, STEPS + 1)) and not report.error for report in reports), reports[0].error
    return Straight(reports, found[0][1], max(found[0][2]))


def draw(random: Random, layout: Layout, straight: Straight, *, first: bool) -> Kill:
    """A moment, and one rank or all of them. The first of a run comes before its last checkpoint, so that it meets the
    run, however busy the machine was when times were taken."""
    every = tuple(range(layout.world))
    ranks = every if random.random() < 0.3 else (random.choice(every),)
    if first:
        return Kill(ranks, random.uniform(0.0, straight.save_seconds / 2), random.randint(1, STEPS // FACTOR - 1))
    if random.random() < 0.5:
        return Kill(ranks, random.uniform(0.0, straight.seconds))
    return Kill(ranks, random.uniform(0.0, 2 * straight.save_seconds), random.randint(1, STEPS // FACTOR))


def survive(
    keys: dict[str, Any], layout: Layout, folder: Path, straight: Straight, random: Random, kills: int
) -> list[Kill]:
    """Start a run in `folder` again until it is complete, and kill it at most so many times on the way.

    Returns the kills that met it. Raises `AssertionError` unless each start went on from where one before had saved,
    and the losses, weights and moments are those of the undisturbed run, bit for bit.
    """
    met: list[Kill] = []
    keys = {**KEYS, **keys, "save": str(folder)}
    while True:
        kill = draw(random, layout, straight, first=not met) if len(met) < kills else None
        try:
            found = run_distributed(killed, layout.world, keys, layout, kill, timeout=110)
        except RankFailure as failure:
            if kill is None or "signal 9" not in str(failure):
                raise AssertionError(f"after {met}, with {kill}") from failure
            met.append(kill)
            continue
        for (report, *_), whole in zip(found, straight.reports, strict=True):
            assert not report.error, (met, report.error)
            assert report.steps == whole.steps[len(whole.steps) - len(report.steps) :], met
            assert report.loss == whole.loss[len(whole.loss) - len(report.loss) :], met
            assert report.state == whole.state and report.state, met
        return met
