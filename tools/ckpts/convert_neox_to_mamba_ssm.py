"""Convert a checkpoint of a Mamba model to the folder that mamba-ssm's own MambaLMHeadModel opens.

python tools/ckpts/convert_neox_to_mamba_ssm.py --input_dir checkpoints/global_step100 --output_dir mamba-ssm/

For transformers use tools/ckpts/convert_neox_to_hf.py, which also compares the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, begin
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--input_dir", required=True, help="a global_step<N> folder, or a save folder (its latest)")
    flags.add_argument("--output_dir", required=True, help="the folder to make")
    add_config_files(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """Convert and print what was made."""
    given = parser().parse_args(argv)
    begin(given)
    from megatron.convert.raw.mamba_ssm import export_mamba_ssm  # after the flags: torch takes seconds to import

    print(export_mamba_ssm(given.input_dir, given.output_dir, given.config_file))


if __name__ == "__main__":
    run_cli(main)
