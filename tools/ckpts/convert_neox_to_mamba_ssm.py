"""Convert a checkpoint of a Mamba model to the folder that mamba-ssm's own MambaLMHeadModel opens.

python tools/ckpts/convert_neox_to_mamba_ssm.py --input_dir checkpoints/global_step100 --output_dir mamba-ssm/

For transformers use tools/ckpts/convert_neox_to_hf.py, which also compares the logits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, begin
from megatron.errors import run_cli


def main() -> None:
    """Convert and print what was made."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--input_dir", required=True, help="a global_step<N> folder, or a save folder (its latest)")
    flags.add_argument("--output_dir", required=True, help="the folder to make")
    add_config_files(flags)
    given = flags.parse_args()
    begin(given)
    from megatron.convert.raw.mamba_ssm import export_mamba_ssm  # after the flags: torch takes seconds to import

    print(export_mamba_ssm(given.input_dir, given.output_dir, given.config_file))


if __name__ == "__main__":
    run_cli(main)
