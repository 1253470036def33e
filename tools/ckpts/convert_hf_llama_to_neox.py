"""Convert a Llama of Hugging Face to a checkpoint, with GPT-NeoX's flags.

python tools/ckpts/convert_hf_llama_to_neox.py --tp 2 --model meta-llama/Llama-2-7b-hf --model_path llama

makes llama/global_step0, llama/config.yml and llama/tokenizer/. huggingface/convert_hf_to_neox.py is the same for every
family.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_precision, add_safety, run_import
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks to split the files for")
    flags.add_argument("--pp", type=int, default=0, help="pipe_parallel_size of the config file")
    flags.add_argument("--model", dest="hf_model", required=True, metavar="PATH_OR_ID", help="a folder, or a Hub model")
    flags.add_argument("--model_path", dest="output_dir", required=True, help="the folder to make")
    flags.add_argument("--revision", help="branch, tag or commit on the Hub")
    flags.add_argument("--iteration", type=int, default=0, help="the step in the checkpoint's name")
    add_precision(flags)
    add_safety(flags, "an existing iteration")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with GPT-NeoX's flags."""
    given = parser().parse_args(argv)
    run_import(given, pp=given.pp, precision=given.precision, families=("llama", "mistral"))
    return 0


if __name__ == "__main__":
    run_cli(main)
