"""`deepy.json` of a published model: from which checkpoint it was made, and the hashes of the files it has.

With it a branch on the Hub is known to be complete, or not, without any local copy: its record names the checkpoint,
and the Hub lists the hashes of the files that are there.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint
from megatron.errors import UserError
from megatron.files import from_json, read_json, write_atomically
from megatron.hub.push import MAIN, hash_file, is_same, local_files
from megatron.hub.retry import Retry
from megatron.log import ProgressBar

RECORD = "deepy.json"


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes, SHA-256 and git's SHA-1 of a file: the Hub lists SHA-256 of large files, SHA-1 of others."""

    size: int
    sha256: str
    blob: str


@dataclass(frozen=True)
class Record:
    """What a folder was made from.

    Attributes:
        experiment: the run's name, by which two runs that want one repository are told apart.
        source: a fingerprint of the checkpoint (`fingerprint`); "" of the branch main before the last step.
        settings: of the conversion.
        largest_difference: of any logit; None when not compared.
        tasks: evaluated on the folder.
        files: all others of the folder.
    """

    experiment: str
    source: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    largest_difference: str | None = None
    tasks: tuple[str, ...] = ()
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into `folder`, complete or not at all."""
        write_atomically(folder / RECORD, json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """That of a folder; None when there is none, or none that can be read."""
        try:
            return from_json(cls, read_json(folder / RECORD))
        except (OSError, ValueError, UserError):
            return None

    def fits(self, source: str, settings: Mapping[str, str]) -> bool:
        """Whether it is of this checkpoint, converted in this way."""
        return self.source == source and dict(self.settings) == dict(settings)


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's manifest, which has the checksums of its files; of GPT-NeoX's, names and sizes."""
    path = checkpoint.path / layout.MANIFEST
    if not checkpoint.by_neox:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    files = {
        name: (found.stat().st_size, found.stat().st_mtime_ns) for name, found in local_files(checkpoint.path).items()
    }
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def hash_files(folder: Path) -> dict[str, FileRecord]:
    """Of all files of a folder that are uploaded, but the record."""
    files = {name: path for name, path in local_files(folder).items() if name != RECORD}
    found = {}
    with ProgressBar(f"hashing {folder}", sum(path.stat().st_size for path in files.values()), "B") as bar:
        for name, path in files.items():
            hashes = hash_file(path, ("sha256", "blob"), bar)
            found[name] = FileRecord(path.stat().st_size, hashes["sha256"], hashes["blob"])
    return found


class Published:
    """A repository as it is on the Hub: what its branches hold."""

    def __init__(self, repo: str, retry: Retry) -> None:
        from huggingface_hub import HfApi

        self.repo, self._retry, self._api = repo, retry, HfApi()

    def list_files(self, revision: str = MAIN) -> dict[str, Any]:
        """Entries (`RepoFile`) by name; {} when there is no such repository or branch."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        def listing() -> dict[str, Any]:
            try:
                tree = list(self._api.list_repo_tree(self.repo, revision=revision, recursive=True))
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return {}
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

        return self._retry.call(listing, what=f"listing the files of {self.repo} ({revision})")

    def read_record(self, revision: str, files: Mapping[str, Any]) -> Record | None:
        """The record of a branch with these files; None when it has none."""
        if RECORD not in files:
            return None
        with tempfile.TemporaryDirectory(prefix="deepy-") as folder:
            what = f"reading {RECORD} of {self.repo} ({revision})"
            self._retry.call(
                self._api.hf_hub_download, self.repo, RECORD, revision=revision, local_dir=folder, what=what
            )
            return Record.read(Path(folder))

    def is_complete(self, revision: str, source: str, settings: Mapping[str, str], tasks: Sequence[str] = ()) -> bool:
        """Whether a branch is the checkpoint `source`, with every file that its record names, by hash."""
        files = self.list_files(revision)
        record = self.read_record(revision, files)
        if record is None or not record.files or not record.fits(source, settings) or set(tasks) - set(record.tasks):
            return False
        return all(
            is_same(files.get(name), expected.size, partial(getattr, expected))
            for name, expected in record.files.items()
        )

    def check(self, experiment: str, source: str, branches: Sequence[str]) -> None:
        """Raise `UserError` when another run is in this repository, or another checkpoint than `source` on a branch.

        `branches`: that are to be replaced; () replaces whatever checkpoints there are.
        """
        main = self.read_record(MAIN, self.list_files())
        if main is not None and main.experiment != experiment:
            raise UserError(
                f"{self.repo} holds the run {main.experiment!r}, not {experiment!r}; give one of them a name of its "
                "own (--names, documentation/publishing.md)"
            )
        for branch in branches:
            record = main if branch == MAIN else self.read_record(branch, self.list_files(branch))
            if record is not None and record.source not in ("", source):
                raise UserError(
                    f"{self.repo} has another checkpoint as {branch}: of another run called {experiment!r} (then give "
                    "one of them a name of its own, --names), or of this one as it was before (then give --replace)"
                )
