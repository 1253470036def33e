"""Convert LLaMA's or Mistral's own files (params.json, consolidated.XX.pth) to a checkpoint.

python tools/ckpts/convert_raw_llama_weights_to_neox.py --input_dir LLaMA --model_size 7B --output_dir llama \\
    --num_output_shards 2

makes llama/global_step0 (loads at any layout), llama/config.yml and llama/tokenizer/. At the end the logits are
compared with those of the published formulas on the files themselves; when they differ nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_precision, add_safety, report
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.log import configure


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument(
        "--input_dir", required=True, help="a folder with params.json, or with one of --model_size in it"
    )
    flags.add_argument(
        "--model_size",
        default="",
        help="7B, 13B, Mistral-7b-v0.1, llama3.1-8B, ...: the folder's name inside --input_dir, and the release, which "
        "Llama 3.1 and later need",
    )
    flags.add_argument("--output_dir", required=True, help="the folder to make, or one with other steps of the model")
    flags.add_argument("--num_output_shards", type=int, default=1, help="tensor-parallel ranks to split the files for")
    flags.add_argument(
        "--pipeline_parallel", action="store_true", help="pipe_parallel_size 1 in the config file, not 0"
    )
    flags.add_argument("--iteration", type=int, default=0, help="the step in the checkpoint's name")
    flags.add_argument("--max_position_embeddings", type=int, metavar="N", help="default: that of the release")
    add_precision(flags)
    add_safety(flags, "an existing iteration")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert with GPT-NeoX's flags, and ours."""
    given = parser().parse_args(argv)
    configure()
    from megatron.convert.raw.import_raw import import_raw  # after the flags: torch takes seconds to import

    done = import_raw(
        given.input_dir,
        given.output_dir,
        model_size=given.model_size,
        longest=given.max_position_embeddings,
        tp=given.num_output_shards,
        pp=1 if given.pipeline_parallel else 0,
        iteration=given.iteration,
        precision=given.precision,
        check=not given.no_check,
        overwrite=given.overwrite,
    )
    report(f"{done.folder}\n{done.config}", done.largest_difference, "the published formulas")
    return 0


if __name__ == "__main__":
    run_cli(main)
