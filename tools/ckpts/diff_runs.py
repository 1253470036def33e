"""Where do two runs part? Names the first step, layer and tensor at which their numbers differ.

python tools/ckpts/diff_runs.py checkpoints other-checkpoints

A and B are the `save` folders of two runs, of any layout each. First the metrics of all steps that both have logged are
compared (log_interval: 1 has them of every step), then the checkpoints of the same steps, oldest first: weights, fp32
masters and moments of the optimizer, bit for bit. To find the layer where two runs part, keep checkpoints of their
first steps (extra_save_iters: [1, 2, 3]).

Exit code 0: everything that both have is equal. Exit code 2: it is not, and the output says where.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The two runs."""
    flags = Parser(description=__doc__)
    flags.add_argument("one", metavar="A", type=Path, help="the save folder of a run")
    flags.add_argument("other", metavar="B", type=Path, help="the save folder of another run")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print what was found."""
    given = parser().parse_args(argv)
    log.configure()
    from megatron.checkpoint.diff_runs import diff_runs  # after the flags: torch takes seconds to import

    found = diff_runs(given.one, given.other)
    if found.steps is not None:
        first, last, count = found.steps
        print(f"metrics: {count} steps in both, {first} to {last}")
        for metric in found.metrics:
            print(
                f"  step {metric.step} is the first to differ: {metric.name} {metric.values[0]!r}, {metric.values[1]!r}"
            )
    steps = ", ".join(map(str, found.checkpoints)) or "none"
    print(f"checkpoints in both: {steps}")
    if found.step is not None:
        print(f"  that of step {found.step} is the first to differ, from layer {found.layer} on:")
        for tensor in found.tensors:
            print(f"    {tensor}")
    if found.equal:
        print("everything that both have is equal")
    return 0 if found.equal else 2


if __name__ == "__main__":
    run_cli(main)
