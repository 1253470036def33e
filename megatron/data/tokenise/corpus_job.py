"""Tokenising files as a command does it: a shard of them if asked, taken up where an earlier run was killed.

What the tools over it differ in is the encoder; everything else is here, so that all of them shard, resume, report and
describe their results alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.tokenise.encode import ChunkEncoder, Tally, write_datasets
from megatron.data.tokenise.encode_progress import EncodeProgress
from megatron.data.tokenise.formats import START, Part, read_parts
from megatron.data.tokenise.resume import Journal, digest
from megatron.data.tokenise.shards import Shard, parse_shard
from megatron.data.tokens.manifest import Manifest
from megatron.data.tokens.partial import PARTIAL
from megatron.errors import UserError
from megatron.log import get_logger

SAVE_EVERY = 60.0  # seconds; a save waits for the disk

logger = get_logger(__name__)


@dataclass(frozen=True)
class JobOptions:
    """How files are tokenised, none of which changes a byte of the result.

    `workers`: processes. `shard`: the part of the files that is this process's. `save_every`: seconds of work that a
    killed run may lose (0: all of it). `restart`: do not go on from what an earlier run left. `num_docs` and
    `log_interval` are for the display.
    """

    workers: int = 1
    shard: Shard | None = None
    save_every: float = SAVE_EVERY
    restart: bool = False
    num_docs: int | None = None
    log_interval: int = 100

    def prefix(self, output_prefix: str) -> str:
        """What the names of everything written begin with: the prefix given, and which shard it is."""
        return output_prefix + (self.shard.name if self.shard else "")


@dataclass(frozen=True)
class Result:
    """The datasets that were written, by prefix, and all counts."""

    datasets: Mapping[str, Manifest]
    total: Tally
    seconds: float = field(compare=False, default=0.0)

    def summary(self) -> str:
        """A line per dataset."""
        rows = self.datasets.items()
        return "\n".join(f"{name}: {m.documents} documents, {m.tokens} tokens, {m.dtype}" for name, m in rows)


def tokenise_files(
    paths: Sequence[Path],
    encoder: ChunkEncoder,
    output_prefix: str,
    options: JobOptions,
    *,
    settings: Mapping[str, Any],
    skip_bad: bool,
    source: Mapping[str, Any] | None = None,
) -> Result:
    """Make the datasets `output_prefix` (+ the shard's name) + the suffix of each output of the encoder.

    Args:
        paths: the whole input, also of a shard: all shards have to be given the same files in the same order.
        settings: what else the result depends on, beside files, tokenizer and what the outputs say of themselves;
            JSON-able. A killed run is only continued, and shards are only joined, when these are equal.
        skip_bad: whether the encoder leaves unusable records out.
        source: what the manifests say of the input (default: the names of the files).

    Raises `UserError`: see `write_datasets`, `Shard.parts` and `Journal`; and for an output folder that cannot be
    written to, before anything is read.
    """
    started = time.monotonic()
    prefix = options.prefix(output_prefix)
    check_writable(prefix)
    parts = options.shard.parts(paths) if options.shard else [Part(path) for path in paths]
    size = sum(part.size for part in parts)
    share = f", of which {size / 1e6:.1f} MB in shard {options.shard}" if options.shard else ""
    logger.info(f"input: {len(paths)} files, {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB{share}")
    journal = _journal(prefix, paths, encoder, options, settings)
    earlier = _earlier(journal, skip_bad)
    shown = EncodeProgress(size, num_docs=options.num_docs, log_interval=options.log_interval, earlier=earlier)
    cuts = read_parts(parts, journal.start if journal else START)
    with shown as progress:
        manifests, total = write_datasets(
            journal.watch(cuts) if journal else (chunk for chunk, _ in cuts),
            encoder,
            prefix,
            workers=options.workers,
            source={"files": [path.name for path in paths]} if source is None else dict(source),
            report=progress,
            journal=journal,
            shard=_said_of_shard(options.shard, paths, encoder, settings) if options.shard else None,
        )
    if any(total.empty) or total.faults:
        logger.info(f"left out: {sum(total.empty)} empty documents, {total.faults} unusable records")
    names = [prefix + output.suffix for output in encoder.outputs]
    return Result(dict(zip(names, manifests)), total, time.monotonic() - started)


def _journal(
    prefix: str, paths: Sequence[Path], encoder: ChunkEncoder, options: JobOptions, settings: Mapping[str, Any]
) -> Journal | None:
    """None for what cannot be read twice, such as a named pipe."""
    if not all(path.is_file() for path in paths):
        return None
    stats = [(path, path.stat()) for path in paths]
    identity = {
        "the input files": [[str(path.absolute()), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "the options": [dict(settings), _outputs(encoder)],
        "the tokenizer": _tokenizer(encoder),
        "the shard": str(options.shard),
    }
    return Journal(prefix, identity, options.save_every, restart=options.restart)


def _said_of_shard(
    shard: Shard, paths: Sequence[Path], encoder: ChunkEncoder, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a shard's manifests say of it; `run` is equal for what may be joined."""
    files = [[path.name, path.stat().st_size] for path in paths]
    run = digest([files, dict(settings), _outputs(encoder), _tokenizer(encoder)])
    return {"index": shard.index, "count": shard.count, "run": run}


def _outputs(encoder: ChunkEncoder) -> list[list[Any]]:
    return [[output.suffix, output.dtype.name, output.key, dict(output.extra)] for output in encoder.outputs]


def _tokenizer(encoder: ChunkEncoder) -> list[Any]:
    """The id map, and the content of the files: merges and normalisers are not in the map."""
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in encoder.tokenizer.files().items()}
    return [encoder.tokenizer.name, encoder.tokenizer.fingerprint().to_dict(), files]


def _earlier(journal: Journal | None, skip_bad: bool) -> Tally | None:
    """The counts of the run that is continued; says so."""
    if journal is None or journal.saved is None:
        return None
    earlier = Tally.restored(journal.saved.counts)
    if earlier.faults and not skip_bad:
        raise UserError(
            f"{journal.path}: the earlier run left {earlier.faults} unusable records out (--skip-bad-lines): give the "
            "flag again to continue it, or --restart to begin anew"
        )
    docs, tokens = max(earlier.documents), sum(earlier.tokens)
    logger.info(
        f"going on where an earlier run stopped, after {docs} documents, {tokens} tokens (--restart begins anew)"
    )
    return earlier


def check_writable(prefix: str) -> None:
    """Raise `UserError` when files called `prefix` + something cannot be made; makes nothing."""
    if not Path(prefix).name or prefix.endswith(os.sep):
        raise UserError(f"--output-prefix {prefix}: a folder; give a name in it too, such as {Path(prefix) / 'corpus'}")
    check_folder(Path(prefix).parent, f"--output-prefix {prefix}")


def check_folder(folder: Path, said: str) -> None:
    """Raise `UserError`, beginning with what the user `said`, when no file can be made in a folder; makes nothing."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{said}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{said}: no permission to write in {folder}")


def write_metadata(prefix: str, arguments: Mapping[str, Any], result: Result) -> Path:
    """Write `<prefix>_metadata.json`, which holds what the manifests may not: arguments, seconds, time of day.

    The names of its keys are those of the file that GPT-NeoX's SLURM fork writes.
    """
    path = Path(f"{prefix}_metadata.json")
    rows = {str(Path(name).name): manifest for name, manifest in result.datasets.items()}
    metadata = {
        "args": {key: value for key, value in arguments.items() if value is not None},
        "token_counts": {name: manifest.tokens for name, manifest in rows.items()},
        "document_counts": {name: manifest.documents for name, manifest in rows.items()},
        "total_tokens": sum(manifest.tokens for manifest in rows.values()),
        "total_documents": sum(manifest.documents for manifest in rows.values()),
        "text_bytes": sum(result.total.text_bytes),
        "input_bytes": result.total.nbytes,
        "seconds": round(result.seconds, 3),
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "output_files": [f"{name}{end}" for name in rows for end in (".bin", ".idx", ".manifest.json")],
    }
    temp = path.with_name(f"{path.name}{PARTIAL}")
    temp.write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    os.replace(temp, path)
    return path


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all tools over `tokenise_files` share."""
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes (1: this one, on all its cores)")
    group.add_argument(
        "--shard", metavar="I/N", help="make part I (from 0) of N, or auto: this process's rank under srun, mpirun, ..."
    )
    group.add_argument("--restart", action="store_true", help="do not go on from what a killed run left")
    group.add_argument(
        "--save-every",
        type=float,
        default=SAVE_EVERY,
        metavar="SECONDS",
        help="work a kill may cost (60; 0: all of it)",
    )
    group.add_argument("--num-docs", type=int, metavar="N", help="expected number of documents (for the display only)")
    group.add_argument("--log-interval", type=int, default=100, metavar="N", help="documents between progress updates")


def job_options(args: argparse.Namespace, env: Mapping[str, str]) -> JobOptions:
    """From those flags. Raises `UserError` for values that make no sense."""
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: give at least 1")
    if not args.save_every >= 0:  # so that nan is caught too
        raise UserError(f"--save-every {args.save_every:g}: give a number of seconds, 0 or more")
    if args.num_docs is not None and args.num_docs < 0:
        raise UserError(f"--num-docs {args.num_docs}: give a number of documents, or leave it out")
    shard = parse_shard(args.shard, env) if args.shard else None
    return JobOptions(args.workers, shard, args.save_every, args.restart, args.num_docs, args.log_interval)
