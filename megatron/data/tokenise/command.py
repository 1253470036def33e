"""What every tokenising command does with its files: read a shard of them if asked, encode, resume, report.

The commands differ in their encoder only.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron import tables
from megatron.data.tokenise.encode import ChunkEncoder, Tally, write_datasets
from megatron.data.tokenise.formats import START, Part, read_parts
from megatron.data.tokenise.journal import Journal, digest
from megatron.data.tokenise.progress import TallyProgress
from megatron.data.tokenise.shards import Shard
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import Manifest
from megatron.data.tokens.merge import merge_groups
from megatron.data.tokens.merge_inputs import Group
from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.log import ProgressBar, get_logger
from megatron.tokenizer import Tokenizer

SAVE_EVERY = 60.0  # seconds; a save waits for the disk

logger = get_logger(__name__)


@dataclass(frozen=True)
class CommandOptions:
    """How files are tokenised, none of which changes a byte of the result.

    `workers`: processes. `shard`: the part of the files that this process tokenises. `save_every`: seconds between
    saved states (0: never). `restart`: discard what an earlier command left. `num_docs`, `log_interval`: for the
    progress display.
    """

    workers: int = 1
    shard: Shard | None = None
    save_every: float = SAVE_EVERY
    restart: bool = False
    num_docs: int | None = None
    log_interval: int = 100

    def prefix(self, output_prefix: str) -> str:
        """The prefix of everything written: the one given, with the shard's name."""
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
    options: CommandOptions,
    *,
    settings: Mapping[str, Any],
    skip_bad: bool,
    source: Mapping[str, Any] | None = None,
) -> Result:
    """Write the datasets `output_prefix` (+ the shard's name) + the suffix of each output of the encoder.

    Args:
        paths: the whole input, for a shard too: all shards need the same files in the same order.
        settings: what else the result depends on, besides files, tokenizer and outputs; JSON-able. A killed command is
            resumed, and shards are joined, only when these are equal.
        skip_bad: whether the encoder leaves unusable records out.
        source: the manifests' entry about the input (default: the names of the files).

    Raises `UserError` as `write_datasets`, `Shard.parts` and `Journal` do, and, before anything is read, for an output
    folder that cannot be written to.
    """
    started = time.monotonic()
    prefix = options.prefix(output_prefix)
    check_writable(prefix)
    parts = options.shard.parts(paths) if options.shard else [Part(path) for path in paths]
    size = sum(part.size for part in parts)
    share = f", of which {tables.size(size)} in shard {options.shard}" if options.shard else ""
    files, whole = f"{len(paths)} file{'s' * (len(paths) != 1)}", sum(path.stat().st_size for path in paths)
    logger.info(f"input: {files}, {tables.size(whole)}{share}")
    journal = _journal(prefix, paths, encoder, options, settings)
    earlier = _earlier(journal, skip_bad)
    cuts = read_parts(parts, journal.start if journal else START)
    shown = TallyProgress("tokenising", size, options.num_docs, options.log_interval, earlier)
    with shown as progress:
        manifests, total = write_datasets(
            journal.watch(cuts) if journal else (chunk for chunk, _ in cuts),
            encoder,
            prefix,
            workers=options.workers,
            source={"files": [path.name for path in paths]} if source is None else dict(source),
            report=progress,
            journal=journal,
            shard=_describe_shard(options.shard, paths, encoder, settings) if options.shard else None,
        )
    total.log_left_out()
    names = [prefix + output.suffix for output in encoder.outputs]
    return Result(dict(zip(names, manifests)), total, time.monotonic() - started)


def tokenise_shuffled(
    paths: Sequence[Path],
    encoder: ChunkEncoder,
    output_prefix: str,
    options: CommandOptions,
    *,
    seed: int,
    skip_bad: bool,
    longest: Callable[[int], int] | None = None,
) -> Result:
    """`tokenise_files`, then the documents in an order of chance (`merge_groups`), by way of files that are removed.

    Args:
        seed: of that order, which does not depend on the order of the files.
        longest: cut documents into pieces of so many tokens, given the number of all tokens.

    Raises `UserError` for a shard, which is a part of the documents only.
    """
    if options.shard:
        raise UserError(
            f"--shuffle with --shard {options.shard}: give --shuffle to merge_datasets.py, when all are joined"
        )
    check_writable(output_prefix)
    ordered = f"{output_prefix}.ordered"
    result = tokenise_files(paths, encoder, ordered, options, settings={}, skip_bad=skip_bad)
    suffixes = [output.suffix for output in encoder.outputs]
    groups = [Group(output_prefix + suffix, (ordered + suffix,)) for suffix in suffixes]
    size = sum(Path(f"{ordered}{suffix}.bin").stat().st_size for suffix in suffixes)
    most = longest(sum(manifest.tokens for manifest in result.datasets.values())) if longest else None
    started = time.monotonic()
    with ProgressBar("shuffling", 2 * size, "B") as progress:
        manifests = merge_groups(groups, progress, seed=seed, longest=most)
    for suffix in suffixes:
        for end in (".bin", ".idx", ".manifest.json"):
            Path(f"{ordered}{suffix}{end}").unlink()
    names = (group.output for group in groups)
    return Result(dict(zip(names, manifests)), result.total, result.seconds + time.monotonic() - started)


def _journal(
    prefix: str, paths: Sequence[Path], encoder: ChunkEncoder, options: CommandOptions, settings: Mapping[str, Any]
) -> Journal | None:
    """None for inputs that cannot be read twice, such as named pipes."""
    if not all(path.is_file() for path in paths):
        return None
    stats = [(path, path.stat()) for path in paths]
    identity = {
        "the input files": [[str(path.absolute()), stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "the options": [dict(settings), _outputs(encoder)],
        "the tokenizer": _tokenizer_identity(encoder),
        "the shard": str(options.shard),
    }
    return Journal(prefix, identity, options.save_every, restart=options.restart)


def _describe_shard(
    shard: Shard, paths: Sequence[Path], encoder: ChunkEncoder, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifests' entry about a shard; shards of equal `run` may be joined."""
    files = [[path.name, path.stat().st_size] for path in paths]
    run = digest([files, dict(settings), _outputs(encoder), _tokenizer_identity(encoder)])
    return {"index": shard.index, "count": shard.count, "run": run}


def _outputs(encoder: ChunkEncoder) -> list[list[Any]]:
    return [[output.suffix, output.dtype.name, output.key, dict(output.extra)] for output in encoder.outputs]


def _tokenizer_identity(encoder: ChunkEncoder) -> list[Any]:
    return [encoder.tokenizer.name, *tokenizer_identity(encoder.tokenizer)]


def tokenizer_identity(tokenizer: Tokenizer) -> list[Any]:
    """The id map, and digests of the files: merges and normalisers are not in the map."""
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in tokenizer.files().items()}
    return [tokenizer.fingerprint().without_added().to_dict(), files]


def _earlier(journal: Journal | None, skip_bad: bool) -> Tally | None:
    """The counts of the command that is resumed, which is logged."""
    if journal is None or journal.saved is None:
        return None
    earlier = journal.read_counts(Tally)
    if earlier.faults and not skip_bad:
        raise UserError(
            f"{journal.path}: the earlier command left out {earlier.faults} unusable records (--skip-bad-lines): give "
            "that flag again to resume it, or --restart to start from zero"
        )
    docs, tokens = max(earlier.documents), sum(earlier.tokens)
    logger.info(
        f"resuming where an earlier command stopped: {docs} documents, {tokens} tokens (--restart: start from zero)"
    )
    return earlier


def check_writable(prefix: str) -> None:
    """Raise `UserError` when files called `prefix` + something cannot be created; creates nothing."""
    if not Path(prefix).name or prefix.endswith(os.sep):
        raise UserError(f"--output-prefix {prefix}: a folder; add a name, such as {Path(prefix) / 'corpus'}")
    check_folder(Path(prefix).parent, f"--output-prefix {prefix}")


def check_folder(folder: Path, flag: str) -> None:
    """Raise `UserError`, starting with the `flag` given, when no file can be created in a folder; creates nothing."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"{flag}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{flag}: no permission to write in {folder}")


def trained_share(prefix: str, labels: IndexedDataset) -> str:
    """A line that says how many of the tokens at `prefix` their labels train."""
    values, step = labels.tokens, 1 << 22
    trained = sum(int((values[at : at + step] >= 0).sum()) for at in range(0, len(values), step))
    return f"{prefix}: {trained} of {len(values)} tokens trained ({100 * trained / len(values):.1f} %)"


def write_metadata(prefix: str, arguments: Mapping[str, Any], result: Result) -> Path:
    """Write `<prefix>_metadata.json` with what differs from run to run: arguments, seconds, time of day.

    Its keys are those of the file that GPT-NeoX's SLURM fork writes.
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
    write_atomically(path, json.dumps(metadata, indent=1) + "\n")
    return path
