"""Convert a checkpoint of any tensor-parallel and pipeline layout to a Hugging Face folder.

deepy export checkpoints/global_step100 hf/
python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/global_step100 --output_dir hf/

The folder opens with AutoModelForCausalLM and AutoTokenizer. Before it is published, its logits are compared with those
of our own model; when they differ, nothing is written and the first block that differs is named. The same comparison
of any pair that exists already: tools/ckpts/verify.py A B, or

python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/global_step100 --output_dir hf/ --check-only
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.convert.cli import add_export_flags, add_precision, begin, run_export, take_places
from megatron.errors import run_cli
from megatron.flags import Parser
from megatron.hub import push


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument(
        "places", nargs="*", metavar="CHECKPOINT OUTPUT", help="the same as --input_dir and --output_dir"
    )
    flags.add_argument("--input_dir", help="a global_step<N> folder, or a save folder (its latest)")
    add_export_flags(flags, by_place=True)
    add_precision(flags, "--precision", auto="as trained")
    flags.add_argument(
        "--vocab-is-hf-tokenizer", action="store_true", help="vocab_file is a Hugging Face tokenizer folder"
    )
    flags.add_argument("--pad-token-id", type=int, default=-1, help="pad id of the config; -1: the tokenizer's")
    flags.add_argument(
        "--architecture",
        help="neox, llama, mistral, qwen3, ... (a wrong name lists all); default: the first that can express the model",
    )
    flags.add_argument("--check-only", action="store_true", help="compare with an --output_dir that exists; no writing")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and print what was made."""
    given = take_places(parser(), argv)
    if given.check_only:
        begin(given)
        from megatron.convert.hf.check import check_pair  # after the flags: torch takes seconds to import

        found = check_pair(given.input_dir, given.output_dir, given.config_file or ())
        drift = "" if found.ok else f", first after {found.first_drift}"
        print(f"largest logit difference in fp32: {found.logits:.2e} (allowed {found.allowed:.2e}){drift}")
        return 0 if found.ok else 2
    run_export(
        given,
        push,
        architecture=given.architecture,
        vocab_is_hf=given.vocab_is_hf_tokenizer,
        pad_token_id=None if given.pad_token_id < 0 else given.pad_token_id,
    )
    return 0


if __name__ == "__main__":
    run_cli(main)
