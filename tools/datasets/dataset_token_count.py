"""Count the tokens and documents of datasets, and their sums.

    python tools/datasets/dataset_token_count.py data/stdlib/stdlib_text_document data/other_text_document
    python tools/datasets/dataset_token_count.py data                            # all datasets of a folder
    python tools/datasets/dataset_token_count.py 'data/*_text_document' --json   # for programs

Reads only the index files.
"""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.prefixes import exists
from megatron.errors import UserError, run_cli
from megatron.flags import Parser

COUNTS = ("tokens", "documents", "bytes")


def datasets_of(path: str) -> Iterator[str]:
    """The datasets of a path: itself, all in a folder, or all that a glob matches."""
    if not exists(path) and Path(path).is_dir():
        path = str(Path(glob.escape(path)) / "*")
    elif not glob.has_magic(path):
        yield path
        return
    found = sorted({name[: -len(".idx")] for name in glob.glob(path.removesuffix(".idx") + ".idx")})
    if not found:
        raise UserError(f"{path}: no dataset (.bin and .idx) found")
    yield from found


def count(prefix: str) -> dict[str, str | int]:
    """The counts of one dataset; `bytes` of tokens and index together."""
    data = IndexedDataset(prefix)
    size = sum(Path(f"{data.prefix}{end}").stat().st_size for end in (".bin", ".idx"))
    return {
        "prefix": prefix,
        "tokens": data.num_tokens,
        "documents": data.num_documents,
        "dtype": data.dtype.name,
        "bytes": size,
    }


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("paths", nargs="+", metavar="PATH", help="prefix (with or without .bin/.idx), folder or glob")
    flags.add_argument("--json", action="store_true", help="print one JSON object")
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """A line per dataset, or one JSON object."""
    args = parser().parse_args(argv)
    rows = [count(prefix) for path in args.paths for prefix in datasets_of(path)]
    total = {name: sum(int(row[name]) for row in rows) for name in COUNTS}
    if args.json:
        print(json.dumps({"datasets": rows, "total": total}, indent=1))
        return
    for row in rows:
        print("{prefix}: {tokens} tokens, {documents} documents, {dtype}, {bytes} bytes".format(**row))
    if len(rows) > 1:
        print("total: {tokens} tokens, {documents} documents, {bytes} bytes".format(**total))


if __name__ == "__main__":
    run_cli(main)
