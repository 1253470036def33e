"""Read adapters (LoRA, DoRA) of PEFT as a checkpoint beside a checkpoint of their base.

python tools/ckpts/convert_peft_to_neox.py --adapter adapter/ --base checkpoints/base/global_step0 --output-dir lora/

What is made holds the adapters and names the base: generate.py and eval.py take it with load: lora/, and a run that
trains them on takes it with load and finetune: true and the keys lora_* that its configs/resolved.yml has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.log import configure, result


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--adapter", required=True, help="folder with adapter_config.json and adapter_model.safetensors")
    flags.add_argument(
        "--base", required=True, help="checkpoint of the base: a global_step<N> folder, or a save folder"
    )
    flags.add_argument("--output-dir", required=True, help="the folder to make")
    flags.add_argument("--iteration", type=int, default=0, help="the step in the checkpoint's name")
    flags.add_argument("--overwrite", action="store_true", help="replace an existing iteration")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and print what was made."""
    given = parser().parse_args(argv)
    configure()
    from megatron.convert.hf.peft_import import import_adapters  # after the flags: torch takes seconds to import

    done = import_adapters(
        given.adapter, given.base, given.output_dir, iteration=given.iteration, overwrite=given.overwrite
    )
    result(str(done))
    return 0


if __name__ == "__main__":
    run_cli(main)
