"""Train a byte-level BPE tokenizer on text files.

    python tools/datasets/train_tokenizer.py --json_input_dir corpus/ --tokenizer_output_path tokenizer -v 32000

writes the folder `tokenizer`, which `--tokenizer-type HFTokenizer --vocab-file tokenizer` and
`transformers.AutoTokenizer` open; a path that ends with `.json` gives that one file. Ids 0 and 1 are `<|endoftext|>`
(the end of a document) and `<|padding|>`. The same input gives the same file.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.data.tokenise.chunks import Fault
from megatron.data.tokenise.encode import Tally
from megatron.data.tokenise.formats import read_chunks
from megatron.data.tokenise.inputs import find_inputs
from megatron.errors import UserError, run_cli
from megatron.flags import Parser
from megatron.log import ProgressBar
from megatron.tokenizer.train import NORMALIZERS, train_bpe, write_companions


def texts(paths: list[Path], key: str, skip_bad: bool, progress: ProgressBar) -> Iterator[str]:
    """The texts of all documents. Raises `UserError` for the first unusable one, unless they are to be skipped."""
    tally = Tally.zero(1)
    for chunk in read_chunks(paths):
        for document in chunk.documents([key]):
            if isinstance(document, Fault):
                tally.refuse(document, skip_bad)
            else:
                yield document.texts[key]
        progress(chunk.nbytes)
    tally.log_faults()
    tally.log_left_out()


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    add = flags.add_argument
    add("--json_input_dir", "--json-input-dir", required=True, nargs="+", metavar="PATH", help="folder, files or globs")
    add(
        *("--tokenizer_output_path", "--tokenizer-output-path"),
        required=True,
        metavar="PATH",
        help="a folder to write, or a file ...json",
    )
    add("--tokenizer_type", "--tokenizer-type", default="BPE", choices=["BPE"], help="only byte-level BPE")
    add(
        "-v",
        "--vocab_size",
        "--vocab-size",
        type=int,
        default=52000,
        help="entries, with specials (default: 52000)",
    )
    add("--jsonl-key", default="text", metavar="KEY", help="key that holds the text (default: text)")
    add(
        "--normalizer",
        default="none",
        choices=NORMALIZERS,
        help="none keeps text exact (default); nfkc, GPT-NeoX's, loses some and rules out the fast encoders",
    )
    add("--max-docs", type=int, metavar="N", help="train on the first N documents only (default: all)")
    add("--skip-bad-lines", action="store_true", help="leave out and count unusable records")
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """GPT-NeoX's flags, and more."""
    args = parser().parse_args(argv)
    log.configure()
    paths = find_inputs(args.json_input_dir)
    output = Path(args.tokenizer_output_path)
    file = output if output.suffix == ".json" else output / "tokenizer.json"
    if output.suffix != ".json" and output.exists() and not output.is_dir():
        raise UserError(f"--tokenizer_output_path {output}: a file; give a folder, or a name that ends with .json")
    with ProgressBar("reading", sum(path.stat().st_size for path in paths), "B") as progress:
        documents = itertools.islice(texts(paths, args.jsonl_key, args.skip_bad_lines, progress), args.max_docs)
        size = train_bpe(documents, args.vocab_size, file, normalizer=args.normalizer)
    if output.suffix != ".json":
        write_companions(output)
    print(f"{output}: vocabulary {size}")


if __name__ == "__main__":
    run_cli(main)
