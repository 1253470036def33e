"""Write the adapters (lora_r) of a checkpoint as a folder of PEFT.

python tools/ckpts/convert_neox_to_peft.py --input_dir checkpoints/global_step100 --output_dir adapter/ \\
    --base-model hf/

PeftModel.from_pretrained(base, "adapter/") opens it, where base is the Hugging Face form of the checkpoint that the
adapters were trained on. To merge them into it instead: tools/ckpts/convert_neox_to_hf.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_config_files, add_precision, begin
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.log import result


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--input_dir", required=True, help="a global_step<N> folder, or a save folder (its latest)")
    flags.add_argument("--output_dir", required=True, help="the folder to make")
    flags.add_argument("--iteration", type=int, help="which checkpoint of a save folder; default: its latest")
    flags.add_argument(
        "--base-model", default="", metavar="PATH_OR_ID", help="the base's Hugging Face folder or Hub id"
    )
    flags.add_argument("--architecture", help="neox, llama, ...; default: the first that can express the model")
    flags.add_argument("--ema", action="store_true", help="the moving averages of the adapters (ema_decay)")
    flags.add_argument("--overwrite", action="store_true", help="replace an earlier export in --output_dir")
    add_precision(flags, "--precision", auto="as trained")
    add_config_files(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and print what was made."""
    given = parser().parse_args(argv)
    begin(given)
    from megatron.convert.hf.peft import export_adapters  # after the flags: torch takes seconds to import

    made = export_adapters(
        given.input_dir,
        given.output_dir,
        base_model=given.base_model,
        config_files=given.config_file,
        iteration=given.iteration,
        averaged=given.ema,
        precision=given.precision,
        architecture=given.architecture,
        overwrite=given.overwrite,
    )
    result(f"{made}: adapters for PEFT")
    return 0


if __name__ == "__main__":
    run_cli(main)
