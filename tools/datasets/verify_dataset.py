"""Check token datasets: sizes, pointers, document index, range of the ids, checksums, labels next to them.

python tools/datasets/verify_dataset.py data/stdlib/stdlib_text_document
python tools/datasets/verify_dataset.py 'data/*_document' --full
python tools/datasets/verify_dataset.py 'olmo/part-*.npy' --npy-eod 100257 --vocab-size 100278 --full

Prints a line per dataset and per fault. Exit code 0: all are intact, 2: one is not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log
from megatron.data.tokens.cache import IndexCaches
from megatron.data.tokens.token_files import TokenFiles
from megatron.data.tokens.verify import verify_path
from megatron.errors import UserError, run_cli
from megatron.flags import Parser


def parser() -> Parser:
    """The command's flags."""
    flags = Parser(description=__doc__)
    flags.add_argument("paths", nargs="+", metavar="PATH", help="prefix of a dataset, a .npy file, or a glob")
    flags.add_argument("--full", action="store_true", help="check every token and label, not a sample")
    flags.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below N (default: from the manifest)")
    flags.add_argument("--npy-eod", type=int, metavar="ID", help="the id that ends a document in .npy files")
    flags.add_argument("--npy-dtype", metavar="TYPE", help="type of the ids in .npy files without header")
    flags.add_argument("--data-cache-path", metavar="DIR", help="cache of the document borders of .npy files")
    return flags


def main(argv: Sequence[str] | None = None) -> None:
    """Check every path and print all faults."""
    args = parser().parse_args(argv)
    log.configure()
    files = TokenFiles(args.npy_eod, args.npy_dtype, IndexCaches(args.data_cache_path))
    reports = [
        report
        for path in args.paths
        for report in verify_path(path, full=args.full, vocab_size=args.vocab_size, files=files)
    ]
    for report in reports:
        print(f"{report.path}: {report.facts or 'not readable'}{'' if report.faults else ': whole'}")
        for fault in report.faults:
            print(f"  FAULT {fault}")
    bad = sum(bool(report.faults) for report in reports)
    if bad:
        raise UserError(f"{bad} of {len(reports)} datasets {'is' if bad == 1 else 'are'} damaged (see above).")


if __name__ == "__main__":
    run_cli(main)
