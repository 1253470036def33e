"""Convert a GPT-NeoX or Pythia model of Hugging Face to a checkpoint, with the flags of GPT-NeoX's fork.

python huggingface/convert_hf_gptneox_to_neox.py --hf-model X
python huggingface/convert_hf_gptneox_to_neox.py --hf-model X --revision R --output-dir D --tp N --iteration I

Without --output-dir the checkpoint is made in a folder of the model's name (after the last "/", without "sfm-"; of a
folder called global_step<N> the name of the one around it), in DEEPY_CHECKPOINTS, else in the cluster profile's folder
of checkpoints (slurm/README.md), else in checkpoints/.

The parameters get Transformer Engine's names, with --no-transformer-engine GPT-NeoX's own. Deepy loads both, at any
layout. convert_hf_to_neox.py is the same for every family, with GPT-NeoX's names.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.neox_names import NEOX, TRANSFORMER_ENGINE
from megatron.cluster.profile import checkpoints_folder
from megatron.convert.cli import add_import_flags, add_precision, default_output, run_import
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    add_import_flags(flags, output="a folder named after the model, see above")
    flags.add_argument("--save-tokenizer", action="store_true", help="ignored, for GPT-NeoX's scripts: always copied")
    flags.add_argument(
        "--transformer-engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="parameter names of Transformer Engine (attention.qkv, mlp.fc1_weight, ...), or GPT-NeoX's own "
        "(attention.query_key_value, mlp.linear1.weight, ...)",
    )
    add_precision(flags, "--precision", "--dtype")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with the fork's flags."""
    given = parser().parse_args(argv)
    given.output_dir = given.output_dir or default_output(given.hf_model, checkpoints_folder(os.environ))
    names = TRANSFORMER_ENGINE if given.transformer_engine else NEOX
    run_import(given, precision=given.precision, names=names, families=("neox",))
    return 0


if __name__ == "__main__":
    run_cli(main)
