"""Join the tensor-parallel files of a checkpoint into files for one rank, or split them for another number.

python tools/ckpts/merge20b.py --input_dir 20B_checkpoints --output_dir 20B_checkpoints_merged

is GPT-NeoX's command for the published 20B, whose files are for two ranks. It takes any GPT-NeoX checkpoint (with the
YAML files of its run as --config_file; the default is the 20B's) or Deepy checkpoint. Deepy loads any checkpoint at any
layout and does not need this; other programs may. Only weights are written; they are read back and must be equal bit
for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, add_precision, begin
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.home import HOME

CONFIG_OF_20B = HOME / "configs" / "20B.yml"


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--input_dir", required=True, help="a global_step<N> folder, or a save folder")
    flags.add_argument("--output_dir", required=True, help="a save folder: global_step<N> is made in it")
    flags.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks to split the files for")
    flags.add_argument("--iteration", type=int, help="which checkpoint of a save folder; default: its latest")
    add_config_files(flags, " or 20B.yml")
    add_precision(flags)
    flags.add_argument("--overwrite", action="store_true", help="replace an existing step")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite with GPT-NeoX's flags, and ours."""
    given = parser().parse_args(argv)
    begin(given)
    from megatron.convert.neox.rewrite import rewrite  # after the flags: torch takes seconds to import

    made = rewrite(
        given.input_dir,
        given.output_dir,
        tp=given.tp,
        iteration=given.iteration,
        config_files=given.config_file,
        default_config=str(CONFIG_OF_20B),
        precision=given.precision,
        overwrite=given.overwrite,
    )
    print(made)
    return 0


if __name__ == "__main__":
    run_cli(main)
