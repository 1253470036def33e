"""Convert an OLMo model of Hugging Face to a checkpoint, with the flags of GPT-NeoX's fork.

python huggingface/convert_hf_olmo_to_neox.py --hf-model allenai/OLMo-2-1124-7B --output-dir olmo --tp 2 --dtype bf16

Without --output-dir the checkpoint is made in a folder of the model's name, as convert_hf_gptneox_to_neox.py explains.
The same as convert_hf_to_neox.py, which takes every family.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cluster.profile import checkpoints_folder
from megatron.convert.cli import add_import_flags, add_precision, default_output, run_import
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    add_import_flags(flags, output="a folder named after the model, see above")
    flags.add_argument("--save-tokenizer", action="store_true", help="ignored, for GPT-NeoX's scripts: always copied")
    add_precision(flags, "--dtype", "--precision")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with the fork's flags."""
    given = parser().parse_args(argv)
    given.output_dir = given.output_dir or default_output(given.hf_model, checkpoints_folder(os.environ))
    run_import(given, precision=given.precision, families=("olmo2", "olmo3", "olmoe"))
    return 0


if __name__ == "__main__":
    run_cli(main)
