"""Prepare a Hugging Face dataset for training: load, find the column, count, export, tokenise."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.hub.encoding import DEFAULT_TOKENIZER
from megatron.data.hub.pipeline import PrepareOptions, output_name, prepare_hf_dataset
from megatron.data.hub.records import Request
from megatron.data.tokenise.flags import start_command
from megatron.errors import UserError, run_cli
from megatron.flags import Parser

EXAMPLES = """
examples:
  # a dataset on the Hub: ./data/wikitext_wikitext-2-raw-v1_train/
  python tools/datasets/prepare_hf_dataset.py --dataset Salesforce/wikitext --subset wikitext-2-raw-v1 \\
      --vocab-file tokenizer.json

  # chats: tokens and the labels that train on the assistant only, with the tokenizer's chat template
  python tools/datasets/prepare_hf_dataset.py --dataset chats.jsonl --hf-tokenizer path/to/tokenizer

  # only count tokens
  python tools/datasets/prepare_hf_dataset.py --dataset corpus.parquet --vocab-file tokenizer.json --count-only

output:  <output-base>/<dataset>[_<subset>]_<split>/ with dataset.jsonl, pipeline_results.json, and
         <folder name>_text_document.{bin,idx,manifest.json}; of chats <folder name>_messages_document and
         <folder name>_messages_label_document. On stdout: lines for the run's YAML.
         The same command again does only the missing work. Guide: documentation/huggingface_datasets.md
"""


def parser() -> Parser:
    """The flags of GPT-NeoX's fork, `--revision`, `--chat-template` and `--skip-bad-lines`."""
    flags = Parser(description=__doc__, epilog=EXAMPLES)
    group = flags.add_argument_group("data")
    group.add_argument("--dataset", required=True, metavar="NAME", help="name on the Hub, local file, glob or folder")
    group.add_argument("--subset", metavar="NAME", help="subset (configuration) of the dataset")
    group.add_argument("--split", default="train", help="split, also a slice such as 'train[:1000]' (default: train)")
    group.add_argument("--data-files", metavar="A[,B...]", help="local files or globs, or files inside the dataset")
    group.add_argument("--data-dir", metavar="DIR", help="folder inside the dataset")
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    group = flags.add_argument_group("columns")
    group.add_argument("--text-column", metavar="NAME", help="column of texts or chats (default: text, else messages)")
    group.add_argument(
        "--join-columns", metavar="A,B", help="make one text of these columns, a blank line between them"
    )
    group.add_argument("--midtrain-chat-messages", action="store_true", help="chats become contents without roles")
    group.add_argument("--skip-chat-template", action="store_true", help="chats become the list of messages as text")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave out and count unusable records")
    group = flags.add_argument_group("tokenizer")
    group.add_argument("--vocab-file", metavar="PATH", help="tokenizer.json or a folder with one")
    group.add_argument(
        "--hf-tokenizer",
        metavar="NAME",
        help="folder or name on the Hub, with the chat template (default, without --vocab-file too: "
        f"{DEFAULT_TOKENIZER})",
    )
    group.add_argument("--chat-template", metavar="X", help="Jinja file, or the name of a template of the tokenizer")
    group = flags.add_argument_group("stages")
    group.add_argument("--skip-count", action="store_true", help="do not count tokens first")
    group.add_argument("--skip-tokenize", action="store_true", help="stop after dataset.jsonl")
    group.add_argument("--count-only", action="store_true", help="only count, write nothing")
    group = flags.add_argument_group("output")
    group.add_argument("--output-dir", metavar="DIR", help="folder to write (default: named after the dataset)")
    group.add_argument("--output-base", metavar="DIR", default="data", help="where that folder goes (default: data)")
    group = flags.add_argument_group("running")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(16, usable)  # 16 is the fork's
    group.add_argument("--num-proc", type=int, default=cores, metavar="N", help=f"processes (default here: {cores})")
    group.add_argument("--batch-size", type=int, default=10000, metavar="N", help="maximum rows per piece of work")
    group.add_argument(
        "--tokenize-workers", type=int, metavar="N", help="processes that tokenise (default: --num-proc)"
    )
    group.add_argument("--download-workers", type=int, metavar="N", help="downloads at a time (default: --num-proc)")
    return flags


def parse_args(argv: Sequence[str] | None) -> PrepareOptions:
    """The flags given, as options. Raises `UserError` for impossible values."""
    args = parser().parse_args(argv)
    for name in ("num_proc", "batch_size", "tokenize_workers", "download_workers"):
        if getattr(args, name) is None:
            setattr(args, name, args.num_proc)
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: give at least 1")
    files = tuple(part for part in (args.data_files or "").split(",") if part)
    request = Request(args.dataset, args.subset, args.split, args.data_dir, files, args.revision)
    joined = tuple(part.strip() for part in (args.join_columns or "").split(",") if part.strip())
    given = {name: getattr(args, name) for name in PrepareOptions.__dataclass_fields__ if hasattr(args, name)}
    folder = Path(args.output_dir) if args.output_dir else Path(args.output_base) / output_name(request)
    return PrepareOptions(**given | {"request": request, "output_dir": folder, "join_columns": joined})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages; print the counts and the lines for the run's YAML."""
    start_command("prepare_hf_dataset")
    options = parse_args(argv)
    results = prepare_hf_dataset(options)
    if results.get("token_count") is not None:
        trained = f", {results['trained_tokens']} of them trained" if results["is_messages"] else ""
        print(f"{results['num_documents']} documents, {results['token_count']} tokens{trained}")
    if results.get("tokenized"):
        lines: dict[str, str | list[str]] = {"train_data_paths": [results["data_path"]]}
        if "label_data_path" in results:
            lines["train_label_data_paths"] = [results["label_data_path"]]
        lines |= {"tokenizer_type": "HFTokenizer", "vocab_file": results["vocab_file"]}
        for name, value in lines.items():
            print(f'"{name}": {json.dumps(value)},')


if __name__ == "__main__":
    run_cli(main)
