"""Average the weights of several checkpoints of one run.

python tools/ckpts/average.py checkpoints/global_step800 checkpoints/global_step900 checkpoints/global_step1000 \\
    --output_dir averaged/

The mean of the last checkpoints is often better than each of them. It is taken of the fp32 weights, in fp64, one
parameter at a time, and written as averaged/global_step1000 (the highest step): weights alone, which generate.py,
eval.py and the conversions read, and which a new run starts from with load=averaged finetune=true. The checkpoints may
have different layouts; they must be of one architecture. Adapters are merged into their base first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_precision
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.log import configure, result


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="global_step<N> folders, two or more")
    flags.add_argument("--output_dir", "--output-dir", required=True, help="the save folder to make, or to add to")
    add_precision(flags, "--precision", auto="that of the checkpoint with the highest step")
    flags.add_argument("--overwrite", action="store_true", help="replace a checkpoint of that step in --output_dir")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Average, and print the folder that was made."""
    given = parser().parse_args(argv)
    configure()
    from megatron.convert.average import average  # after the flags: torch takes seconds to import

    result(str(average(given.checkpoints, given.output_dir, precision=given.precision, overwrite=given.overwrite)))
    return 0


if __name__ == "__main__":
    run_cli(main)
