"""Convert a Hugging Face model to a checkpoint, with a ready config file and its tokenizer.

python huggingface/convert_hf_to_neox.py --hf-model EleutherAI/pythia-70m --output-dir pythia-70m --tp 2

makes pythia-70m/global_step0 (loads at any layout), pythia-70m/config.yml and pythia-70m/tokenizer/. At the end its
logits are compared with those of transformers; when they differ nothing is written, and the first block that differs is
named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import run_cli
from megatron.log import configure


def common_flags(description: str | None) -> argparse.ArgumentParser:
    """The flags that every face of this conversion has."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--hf-model", required=True, metavar="PATH_OR_ID", help="a folder, or a model of the Hub")
    flags.add_argument("--revision", help="branch, tag or commit on the Hub")
    flags.add_argument("--output-dir", required=True, help="the folder to make, or one with other steps of the model")
    flags.add_argument("--tp", type=int, default=1, help="cut the files for so many tensor-parallel ranks")
    flags.add_argument("--iteration", type=int, default=0, help="the step in the checkpoint's name")
    flags.add_argument("--no-check", action="store_true", help="publish without comparing logits")
    flags.add_argument("--overwrite", action="store_true", help="replace an iteration that is there")
    return flags


def convert(given: argparse.Namespace, *, pp: int = 1, precision: str = "auto") -> None:
    """Convert as the common flags say, and tell what was made."""
    configure()
    from megatron.convert.import_hf import import_model  # after the flags: torch takes seconds to import

    done = import_model(
        given.hf_model,
        given.output_dir,
        revision=given.revision,
        tp=given.tp,
        pp=pp,
        iteration=given.iteration,
        precision=precision,
        check=not given.no_check,
        overwrite=given.overwrite,
    )
    checked = "not checked" if done.largest_difference is None else f"largest {done.largest_difference:.2e}"
    print(f"{done.folder}\n{done.config}")
    print(f"logit difference between Deepy and transformers in fp32: {checked}")


def main() -> int:
    """Convert with all flags."""
    flags = common_flags(__doc__)
    flags.add_argument("--pp", type=int, default=1, help="pipe_parallel_size of the config file")
    flags.add_argument("--precision", default="auto", choices=("auto", "fp16", "bf16", "fp32"), help="auto: as stored")
    given = flags.parse_args()
    convert(given, pp=given.pp, precision=given.precision)
    return 0


if __name__ == "__main__":
    run_cli(main)
