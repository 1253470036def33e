"""`python -m tests.kills --kills 200`: random kills over layouts, ZeRO stages and engines, with a count in the end."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from tests.kills.killing import survive, undisturbed
from tests.training.runs import corpus
from tests.training.tiny import Layout

BF16 = {"precision": "bfloat16"}
CASES: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(dp=2, zero=1), {}),
    (Layout(pp=2), {}),
    (Layout(dp=2, zero=1, engine="native"), BF16),
    (Layout(tp=2), {}),
    (Layout(dp=2, zero=2), BF16),
    (Layout(dp=2, zero=3), {}),
    (Layout(dp=2, zero=0), {}),
    (Layout(dp=2, zero=1), BF16),
    (Layout(pp=2, dp=2, zero=1), {}),
]


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--kills", type=int, default=200, help="how many have to meet a run")
    flags.add_argument("--each", type=int, default=5, help="how many meet one run at most, before it may end")
    flags.add_argument("--seconds", type=float, default=3600.0, help="begin no further run after that")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--keys", nargs="*", default=[], metavar="KEY", help="keys that are set to true: async_save")
    given = flags.parse_args()
    ends = time.monotonic() + given.seconds
    random, total, runs = Random(given.seed), 0, 0
    straight: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="deepy-kills-") as name:
        folder = Path(name)
        data = {"data_path": corpus(folder / "data"), **dict.fromkeys(given.keys, True)}
        while total < given.kills and time.monotonic() < ends:
            number = runs % len(CASES)
            layout, keys = CASES[number]
            keys = {**keys, **data}
            if number not in straight:
                straight[number] = undisturbed(keys, layout, folder / f"straight{number}")
            met = survive(keys, layout, folder / "killed", straight[number], random, given.each)
            shutil.rmtree(folder / "killed")
            runs, total = runs + 1, total + len(met)
            saving = sum(kill.save is not None for kill in met)
            print(
                f"{layout.name} {keys.get('precision', 'fp32')}: {len(met)} kills ({saving} at checkpoints)", flush=True
            )
    print(f"{total} kills in {runs} runs, of which each ended bit-equal to an undisturbed one")


if __name__ == "__main__":
    main()
