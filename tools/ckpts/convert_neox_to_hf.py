"""Convert a checkpoint of any tensor-parallel and pipeline layout to a Hugging Face folder.

python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/global_step100 --output_dir hf/

The folder opens with AutoModelForCausalLM and AutoTokenizer. Before it is published, its logits are compared with those
of our own model; when they differ, nothing is written and the first block that differs is named. The same comparison
of any pair that exists already, made here or elsewhere:

python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/global_step100 --output_dir hf/ --check-only
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.errors import run_cli
from megatron.log import configure


def parser() -> argparse.ArgumentParser:
    """GPT-NeoX's flags, `--no-check` and `--check-only`."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--input_dir", required=True, help="a global_step<N> folder, or a save folder (its latest)")
    flags.add_argument("--output_dir", required=True, help="the folder to make")
    flags.add_argument(
        "--config_file",
        nargs="+",
        metavar="YAML",
        help="YAML files of the run; optional where the checkpoint holds its config. Their vocab_file wins. A folder "
        "that GPT-NeoX wrote needs them, unless it keeps a copy in configs/",
    )
    flags.add_argument("--precision", default="auto", choices=("auto", "fp16", "bf16", "fp32"), help="auto: as trained")
    flags.add_argument("--no_save_tokenizer", action="store_true", help="leave the tokenizer's files out")
    flags.add_argument(
        "--vocab-is-hf-tokenizer", action="store_true", help="vocab_file is a Hugging Face tokenizer folder"
    )
    flags.add_argument("--pad-token-id", type=int, default=-1, help="pad id of the config; -1: the tokenizer's")
    flags.add_argument(
        "--architecture",
        choices=("neox", "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gpt2", "falcon", "phi3"),
        help="default: the first of these that can express the model",
    )
    flags.add_argument("--no-check", action="store_true", help="publish without comparing logits")
    flags.add_argument("--overwrite", action="store_true", help="replace an earlier export in --output_dir")
    flags.add_argument("--check-only", action="store_true", help="compare with an --output_dir that exists; no writing")
    return flags


def main() -> int:
    """Convert and say what was made."""
    given = parser().parse_args()
    configure()
    if given.check_only:
        from megatron.convert.check import check_pair

        found = check_pair(given.input_dir, given.output_dir, given.config_file or ())
        drift = "" if found.ok else f", first after {found.first_drift}"
        print(f"largest logit difference in fp32: {found.logits:.2e} (allowed {found.allowed:.2e}){drift}")
        return 0 if found.ok else 2
    from megatron.convert.export import export  # after the flags: torch takes seconds to import

    done = export(
        given.input_dir,
        given.output_dir,
        config_files=given.config_file or (),
        precision=given.precision,
        architecture=given.architecture,
        tokenizer=not given.no_save_tokenizer,
        vocab_is_hf=given.vocab_is_hf_tokenizer,
        pad_token_id=None if given.pad_token_id < 0 else given.pad_token_id,
        check=not given.no_check,
        overwrite=given.overwrite,
    )
    checked = "not checked" if done.largest_difference is None else f"largest {done.largest_difference:.2e}"
    print(f"{done.folder}: {done.architecture}")
    print(f"logit difference between Deepy and transformers in fp32: {checked}")
    return 0


if __name__ == "__main__":
    run_cli(main)
