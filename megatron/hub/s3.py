"""Checkpoints in an S3 bucket: `<s3_path>/<name of save>/global_step<N>/...`, as GPT-NeoX lays them out.

A checkpoint is in the bucket once its `manifest.json` is, which is sent last; then `latest` is. Files that are there
already, by size and CRC-32, are not sent again, so an upload that was cut short resumes. Credentials, region and
endpoint are those of boto3: `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL_S3`, `~/.aws/config`, ...
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from megatron.checkpoint import layout
from megatron.checkpoint.manifest import FileEntry, Manifest
from megatron.checksums import file_crc32
from megatron.errors import DeepyError, UserError
from megatron.home import installs
from megatron.hub.retry import first_line
from megatron.log import ProgressBar, get_logger
from megatron.neox_arguments.schema_train import CheckpointConfig

logger = get_logger(__name__)

_DOWNLOAD = ".download-"  # begins the name of the folder in `save` where a checkpoint arrives
_CRC = "crc32"  # metadata of an object


class S3Error(DeepyError):
    """The bucket cannot be read or written."""


class S3Folder:
    """The counterpart of a `save` folder in a bucket.

    Args:
        address: `s3://bucket/path`.
        chunk_bytes: size of the parts in which a large file is sent.

    Raises `UserError` when boto3 is not installed. Every other method raises `S3Error`.
    """

    def __init__(self, address: str, chunk_bytes: int = 100 << 20) -> None:
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
        except ImportError as error:
            raise UserError(f"checkpoints in a bucket need boto3: {installs('s3')}") from error
        self.address = address.rstrip("/")
        self._bucket, _, path = self.address.removeprefix("s3://").partition("/")
        self._prefix = f"{path}/" if path else ""
        self._parts = TransferConfig(multipart_threshold=chunk_bytes, multipart_chunksize=chunk_bytes)
        with self._errors():
            self._client = boto3.client("s3")

    @classmethod
    def of(cls, options: CheckpointConfig) -> S3Folder:
        """That of a run with `s3_path` and `save`."""
        assert options.s3_path is not None and options.save is not None
        return cls(f"{options.s3_path.rstrip('/')}/{Path(options.save).absolute().name}", options.s3_chunk_size)

    def list_steps(self) -> list[int]:
        """The steps whose checkpoint is whole, ascending."""
        found = []
        for key in self._keys(f"{self._prefix}{layout.step_folder(0)[:-1]}"):
            folder, _, name = key.removeprefix(self._prefix).partition("/")
            if name == layout.MANIFEST and (step := layout.step_of(folder)) is not None:
                found.append(step)
        return sorted(found)

    def latest(self) -> int | None:
        """The step that a run resumes at: the highest whole one not above that in `latest`, as in a folder."""
        steps = self.list_steps()
        named = layout.step_of((self._read(layout.LATEST) or b"").decode(errors="replace").strip())
        return max((step for step in steps if named is not None and step <= named), default=max(steps, default=None))

    def has_same(self, folder: Path) -> bool:
        """Whether the checkpoint in `folder` lists the same files, by checksums, as the one of its name here."""
        there, mine = self._read(f"{folder.name}/{layout.MANIFEST}"), (folder / layout.MANIFEST).read_bytes()
        with suppress(ValueError, LookupError, TypeError):  # a damaged one is no copy
            return json.loads(there or b"")["files"] == json.loads(mine)["files"]
        return False

    def upload(self, folder: Path) -> int:
        """Send the complete checkpoint in `folder`. Returns the number of bytes that were not there yet."""
        manifest, sent = Manifest.read(folder), 0
        last = FileEntry((folder / layout.MANIFEST).stat().st_size, file_crc32(folder / layout.MANIFEST))
        name = f"{folder.name}/{layout.MANIFEST}"
        if (there := self._find(name)) == (last.bytes, str(last.crc32)):
            return 0
        if there is not None:  # an older one of this step: not whole from now on; to delete it may be forbidden
            with self._errors():
                self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=b"")
        self._abort(f"{self._prefix}{folder.name}/")
        for file, entry in (*manifest.files.items(), (layout.MANIFEST, last)):
            if self._find(f"{folder.name}/{file}") != (entry.bytes, str(entry.crc32)):
                self._send(folder / file, f"{folder.name}/{file}", entry.crc32)
                sent += entry.bytes
        return sent

    def write_latest(self, step: int) -> None:
        """Name the step to resume at."""
        with self._errors():
            body = layout.step_folder(step).encode()
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + layout.LATEST, Body=body)

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of `step` holds. Raises `UserError`, too, when it makes no sense."""
        with tempfile.TemporaryDirectory(prefix="deepy-") as scratch:
            folder = Path(scratch, layout.step_folder(step))
            folder.mkdir()
            self._fetch(f"{folder.name}/{layout.MANIFEST}", folder / layout.MANIFEST)
            return Manifest.read(folder)

    def download(self, step: int, root: Path, latest: bool = True) -> Path:
        """Fetch the checkpoint of `step` into `root`, complete or not at all: every file is compared with the manifest.
        `latest`: the file of this name in `root` names it then.

        What has arrived when it is cut short is kept, and not fetched again. Raises `S3Error`, and `OSError` when the
        disk is full: then, and when the copy is damaged, nothing is kept.
        """
        from megatron.checkpoint.folder import CheckpointFolder  # needs torch, which the checks before a launch do not

        folder = CheckpointFolder(root, step)
        folder.path = root / f"{_DOWNLOAD}{layout.step_folder(step)}"
        drop_downloads(root, folder.path)
        folder.path.mkdir(parents=True, exist_ok=True)
        try:
            self._fetch(f"{layout.step_folder(step)}/{layout.MANIFEST}", folder.path / layout.MANIFEST)
            manifest = Manifest.read(folder.path)
            problem = self._fill(folder.path, manifest)
        except (OSError, UserError):
            folder.discard()
            raise
        if problem is not None:
            folder.discard()
            raise S3Error(f"{self.address}/{layout.step_folder(step)} {problem}")
        return folder.publish(manifest, latest)

    def _fill(self, folder: Path, manifest: Manifest) -> str | None:
        """Fetch the files of `manifest` that are not in `folder`, and remove all others from it.

        Returns what is wrong with the copy in the bucket, in words; None when nothing is.
        """
        name = layout.step_folder(manifest.step)
        for file in manifest.files:
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                return f"is damaged: {layout.MANIFEST} lists {file!r}, outside the folder"
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            file = path.relative_to(folder).as_posix()
            if file != layout.MANIFEST and manifest.wrong_file(folder, file) is not None:
                path.unlink()
        total = sum(entry.bytes for entry in manifest.files.values())
        kept = [file for file in manifest.files if (folder / file).exists()]
        before = sum(manifest.files[file].bytes for file in kept)
        with ProgressBar(f"downloading {self.address}/{name}", total, "B", before=before) as report:
            for file in manifest.files:
                if file not in kept:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    self._fetch(f"{name}/{file}", folder / file, report)
                    if problem := manifest.wrong_file(folder, file):
                        return f"is damaged: {problem}"
        return None

    def _keys(self, prefix: str) -> Iterator[str]:
        """Of all objects that are not empty."""
        with self._errors():
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix):
                yield from (entry["Key"] for entry in page.get("Contents", ()) if entry["Size"])

    def _find(self, name: str) -> tuple[int, str | None] | None:
        """Bytes and CRC-32 (None when nobody noted it) of what the bucket has under this name; None when nothing is."""
        from botocore.exceptions import ClientError

        with self._errors():
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
            except ClientError as error:
                if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                    return None
                raise
        return found["ContentLength"], found.get("Metadata", {}).get(_CRC)

    def _read(self, name: str) -> bytes | None:
        with self._errors():
            try:
                return self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
            except self._client.exceptions.NoSuchKey:
                return None

    def _send(self, path: Path, name: str, crc: int) -> None:
        with self._errors():
            more = {"Metadata": {_CRC: str(crc)}}
            self._client.upload_file(str(path), self._bucket, self._prefix + name, ExtraArgs=more, Config=self._parts)

    def _fetch(self, name: str, path: Path, report: Callable[[int], None] | None = None) -> None:
        with self._errors():
            self._client.download_file(
                self._bucket, self._prefix + name, str(path), Callback=report, Config=self._parts
            )

    def _abort(self, prefix: str) -> None:
        """Drop the parts of files that a killed upload left: they cost money and nobody sees them.

        Where that is forbidden, or the store cannot do it, they stay: it takes rights that nothing else here needs.
        """
        from botocore.exceptions import ClientError

        with self._errors(), suppress(ClientError):
            found = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix)
            for one in found.get("Uploads", ()):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError) as error:
            raise S3Error(f"{self.address}: {first_line(error)}") from error


def drop_downloads(root: Path, but: Path | None = None) -> None:
    """Remove what downloads that were cut short left in `root`, but one folder."""
    for folder in root.glob(f"{_DOWNLOAD}*"):
        if folder != but:
            shutil.rmtree(folder)
