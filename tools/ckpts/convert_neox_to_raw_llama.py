"""Convert a checkpoint to LLaMA's or Mistral's own files: params.json and consolidated.XX.pth.

python tools/ckpts/convert_neox_to_raw_llama.py --input_dir checkpoints/global_step100 --output_dir raw/ \\
    --num_output_shards 2

A model with a sliding window, or heads of their own width, gets Mistral's params.json, another one LLaMA's. At the end
the logits of the files are computed by the published formulas and compared with ours; when they differ nothing is
written. What these files cannot express is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, add_precision, add_safety, begin, report
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--input_dir", required=True, help="a global_step<N> folder, or a save folder")
    flags.add_argument("--output_dir", required=True, help="the folder to make")
    flags.add_argument("--num_output_shards", type=int, default=1, help="model-parallel ranks to split the files for")
    flags.add_argument("--iteration", type=int, help="which checkpoint of a save folder; default: its latest")
    add_config_files(flags)
    add_precision(flags, auto="as trained")
    add_safety(flags, "an earlier export in --output_dir")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with flags named as in the other direction."""
    given = parser().parse_args(argv)
    begin(given)
    from megatron.convert.raw.export_raw import export_raw  # after the flags: torch takes seconds to import

    done = export_raw(
        given.input_dir,
        given.output_dir,
        shards=given.num_output_shards,
        config_files=given.config_file,
        iteration=given.iteration,
        precision=given.precision,
        check=not given.no_check,
        overwrite=given.overwrite,
    )
    report(str(done.folder), done.largest_difference, "the published formulas")
    return 0


if __name__ == "__main__":
    run_cli(main)
