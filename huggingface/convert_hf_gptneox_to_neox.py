"""Convert a GPT-NeoX or Pythia model of Hugging Face to a checkpoint, with the flags of GPT-NeoX's fork.

python huggingface/convert_hf_gptneox_to_neox.py --hf-model X --revision R --output-dir D --tp N --iteration I

The same as convert_hf_to_neox.py, which takes every family.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import UserError, run_cli
from megatron.log import configure


def parser() -> argparse.ArgumentParser:
    """The fork's flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--hf-model", required=True, metavar="PATH_OR_ID", help="a folder, or a model of the Hub")
    flags.add_argument("--revision", help="branch, tag or commit on the Hub")
    flags.add_argument("--output-dir", required=True, help="the folder to make, or one with other steps of the model")
    flags.add_argument("--tp", type=int, default=1, help="cut the files for so many tensor-parallel ranks")
    flags.add_argument("--iteration", type=int, default=0, help="the step in the checkpoint's name")
    flags.add_argument("--save-tokenizer", action="store_true", help="the tokenizer is always copied")
    flags.add_argument(
        "--transformer-engine",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="parameter names: GPT-NeoX's are written; those of Transformer Engine are not available",
    )
    flags.add_argument("--no-check", action="store_true", help="publish without comparing logits")
    flags.add_argument("--overwrite", action="store_true", help="replace an iteration that is there")
    return flags


def main() -> int:
    """Convert and say what was made."""
    given = parser().parse_args()
    configure()
    if given.transformer_engine:
        raise UserError("--transformer-engine: its parameter names are not written; leave the flag out")
    from megatron.convert.import_hf import import_model  # after the flags: torch takes seconds to import

    done = import_model(
        given.hf_model,
        given.output_dir,
        revision=given.revision,
        tp=given.tp,
        iteration=given.iteration,
        check=not given.no_check,
        overwrite=given.overwrite,
    )
    checked = "not checked" if done.largest_difference is None else f"largest {done.largest_difference:.2e}"
    print(f"{done.folder}\n{done.config}")
    print(f"logit difference between Deepy and transformers in fp32: {checked}")
    return 0


if __name__ == "__main__":
    run_cli(main)
