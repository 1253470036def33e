"""Convert token files to a .bin/.idx pair: GPT-NeoX's old `cached`/`lazy` datasets, or .npy files.

python tools/datasets/convert_dataset.py --input old/corpus_text_document --output-prefix data/corpus_text_document
python tools/datasets/convert_dataset.py --input 'olmo/part-*.npy' --npy-eod 100257 --output-prefix data/olmo_document

Documents are not changed. (Training reads all of them without conversion: give them as a data path.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.data.tokens.cache import IndexCaches
from megatron.data.tokens.convert import convert
from megatron.data.tokens.token_files import TokenFiles
from megatron.errors import run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("--input", required=True, metavar="PATH", help="prefix, .npy file, or a glob (joined)")
    flags.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the result without suffix")
    flags.add_argument("--dtype", choices=("uint16", "int32"), help="type of a stored token (default: unchanged)")
    flags.add_argument("--npy-eod", type=int, metavar="ID", help="the id that ends a document in .npy files")
    flags.add_argument("--npy-dtype", metavar="TYPE", help="type of the ids in .npy files without header")
    flags.add_argument("--data-cache-path", metavar="DIR", help="cache of the document borders of .npy files")
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """One input, one output."""
    args = parser().parse_args(argv)
    log.configure()
    data = TokenFiles(args.npy_eod, args.npy_dtype, IndexCaches(args.data_cache_path)).open(args.input)
    dtype = np.dtype(args.dtype) if args.dtype else None
    manifest = convert(data, args.output_prefix, dtype)
    print(f"{args.output_prefix}: {manifest.documents} documents, {manifest.tokens} tokens, {manifest.dtype}")


if __name__ == "__main__":
    run_cli(main)
