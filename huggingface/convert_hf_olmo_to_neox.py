"""Convert an OLMo model of Hugging Face to a checkpoint, with the flags of GPT-NeoX's fork.

python huggingface/convert_hf_olmo_to_neox.py --hf-model allenai/OLMo-2-1124-7B --output-dir olmo --tp 2 --dtype bf16

The same as convert_hf_to_neox.py, which takes every family.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.convert.cli import add_import_flags, add_precision, flags_for, run_import
from megatron.errors import run_cli


def main() -> int:
    """Convert with the fork's flags."""
    flags = flags_for(__doc__)
    add_import_flags(flags)
    flags.add_argument("--save-tokenizer", action="store_true", help="ignored, for GPT-NeoX's scripts: always copied")
    add_precision(flags, "--dtype", "--precision")
    given = flags.parse_args()
    run_import(given, precision=given.precision, families=("olmo2", "olmo3", "olmoe"))
    return 0


if __name__ == "__main__":
    run_cli(main)
