"""Convert a GPT-NeoX or Pythia model of Hugging Face to a checkpoint, with the flags of GPT-NeoX's fork.

python huggingface/convert_hf_gptneox_to_neox.py --hf-model X --revision R --output-dir D --tp N --iteration I

The same as convert_hf_to_neox.py, which takes every family.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convert_hf_to_neox import common_flags, convert

from megatron.errors import UserError, run_cli


def main() -> int:
    """Convert with the fork's flags."""
    flags = common_flags(__doc__)
    flags.add_argument("--save-tokenizer", action="store_true", help="the tokenizer is always copied")
    flags.add_argument(
        "--transformer-engine",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="parameter names: GPT-NeoX's are written; those of Transformer Engine are not available",
    )
    given = flags.parse_args()
    if given.transformer_engine:
        raise UserError("--transformer-engine: its parameter names are not written; leave the flag out")
    convert(given)
    return 0


if __name__ == "__main__":
    run_cli(main)
