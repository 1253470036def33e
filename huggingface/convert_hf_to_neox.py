"""Convert a Hugging Face model of any family to a checkpoint, with a ready config file and its tokenizer.

python huggingface/convert_hf_to_neox.py --hf-model EleutherAI/pythia-70m --output-dir pythia-70m --tp 2

makes pythia-70m/global_step0 (loads at any layout), pythia-70m/config.yml and pythia-70m/tokenizer/. The folder may be
moved. At the end its logits are compared with those of transformers; when they differ nothing is written, and the first
block that differs is named.

Without --output-dir the checkpoint is made in a folder of the model's name, as convert_hf_gptneox_to_neox.py explains.
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
    flags.add_argument("--pp", type=int, default=1, help="pipe_parallel_size of the config file")
    add_precision(flags, "--precision", "--dtype")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with all flags."""
    given = parser().parse_args(argv)
    given.output_dir = given.output_dir or default_output(given.hf_model, checkpoints_folder(os.environ))
    run_import(given, pp=given.pp, precision=given.precision)
    return 0


if __name__ == "__main__":
    run_cli(main)
