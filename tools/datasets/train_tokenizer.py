"""Train a byte-level BPE tokenizer on text files and write it as tokenizer.json.

    python tools/datasets/train_tokenizer.py --json_input_dir corpus/ --tokenizer_output_path tokenizer.json -v 32000

Use the result with `--tokenizer-type HFTokenizer --vocab-file tokenizer.json`. Ids 0 and 1 are `<|endoftext|>` and
`<|padding|>`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.data.chunks import Fault
from megatron.data.formats import find_inputs, read_chunks
from megatron.errors import UserError, run_cli
from megatron.tokenizer.train import NORMALIZERS, train_bpe


def texts(paths: list[Path], key: str) -> Iterator[str]:
    """The texts of all documents. Raises `UserError` at the first one that cannot be used."""
    for chunk in read_chunks(paths):
        for document in chunk.documents([key]):
            if isinstance(document, Fault):
                raise UserError(f"{document.where}: {document.reason}")
            yield document.texts[key]


def main() -> None:
    """GPT-NeoX's flags, the key and the normaliser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json_input_dir", "--json-input-dir", required=True, nargs="+", metavar="PATH", help="folder, files or globs")
    add("--tokenizer_output_path", "--tokenizer-output-path", required=True, metavar="FILE", help="the tokenizer.json")
    add("--tokenizer_type", "--tokenizer-type", default="BPE", choices=["BPE"], help="only byte-level BPE")
    add("-v", "--vocab_size", "--vocab-size", type=int, default=52000, help="entries, with specials (default 52000)")
    add("--jsonl-key", default="text", metavar="KEY", help="key that holds the text (default: text)")
    add("--normalizer", default="nfkc", choices=NORMALIZERS, help="nfkc as GPT-NeoX (default); none keeps text exact")
    args = parser.parse_args()
    log.configure()
    paths = find_inputs(args.json_input_dir)
    documents = log.progress(texts(paths, args.jsonl_key), what="reading", unit="doc")
    size = train_bpe(documents, args.vocab_size, Path(args.tokenizer_output_path), normalizer=args.normalizer)
    print(f"{args.tokenizer_output_path}: vocabulary {size}")


if __name__ == "__main__":
    run_cli(main)
