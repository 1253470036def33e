"""From the name of a dataset to its records: local files and folders, `save_to_disk` folders, the Hugging Face Hub."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.data.hub.records import FileRecords, Records, Request, Stamps, TableRecords, content_key, is_raw
from megatron.data.hub.retry import Backoff
from megatron.data.tokenise.compression import ending_of
from megatron.errors import UserError, nearest
from megatron.log import get_logger, progress
from megatron.tokenizer.hub import require_hub

# The builder of `datasets` by file extension, for files that are not read directly.
BUILDERS = {".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"}), ".txt": ("text", {})}
HUB_FILE = re.compile(r"hf://datasets/(?P<repo>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")

logger = get_logger(__name__)


@dataclass(frozen=True)
class Loader:
    """Loads datasets. `workers`: downloads at a time; `batch_size`: rows of a piece; `stamps`: digests of files."""

    backoff: Backoff
    workers: int
    batch_size: int
    stamps: Stamps

    def load(self, request: Request) -> Records:
        """The records of a dataset.

        Raises `UserError` for an unknown dataset, subset, split or file, without a network, after many refusals.
        """
        if files := _local_files(request):
            return self._from_files(request, files)
        path = Path(request.dataset).expanduser()
        if not path.exists() and (is_raw(path) or ending_of(path) in BUILDERS):
            raise UserError(f"--dataset {request.dataset}: no such file")
        if path.is_dir() and (saved := _saved_folder(path, request.split)):
            return self._table(request, _saved_table(saved, request.split), str(saved))
        return self._from_builder(request, local=path.exists())

    def load_cached(self, request: Request, repo_files: Sequence[str]) -> Records:
        """The files of an earlier command from the local cache, without asking the Hub."""
        return self._from_hub(request, repo_files)

    def _from_files(self, request: Request, files: list[Path]) -> Records:
        kinds = {is_raw(path) or ending_of(path) for path in files}
        if len(kinds) > 1:
            raise UserError(f"{', '.join(path.name for path in files[:5])}: give files of one kind")
        if kinds == {True} and request.split == "train":
            return self._raw(request, files)
        name, options = ("parquet" if ending_of(files[0]) == ".parquet" else "json"), dict[str, Any]()
        if kinds != {True}:
            if ending_of(files[0]) not in BUILDERS:
                raise UserError(
                    f"{files[0]}: unknown kind of file. Known: .jsonl .ndjson .json (also as .gz .zst .xz .bz2), "
                    f".parquet, .arrow, {', '.join(BUILDERS)}, and folders"
                )
            name, options = BUILDERS[ending_of(files[0])]
        options = {**options, "data_files": {"train": [str(f) for f in files]}}
        return self._through_datasets(request, name, options)

    def _raw(self, request: Request, files: list[Path]) -> Records:
        described = request.describe() | {"files": [path.name for path in files]}
        return FileRecords(files, self.stamps.key(files), described)

    def _from_builder(self, request: Request, local: bool) -> Records:
        """A Hub dataset or a local folder: `datasets` finds the files of the subset and split."""
        from datasets import load_dataset_builder

        _silence_datasets()
        given: dict[str, Any] = {"data_dir": request.data_dir, "revision": request.revision}
        if request.data_files:
            given["data_files"] = {_split_name(request.split): list(request.data_files)}
        builder = self._ask(request, local, lambda: load_dataset_builder(request.dataset, request.subset, **given))
        splits = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
        if splits and request.split != "all":
            _require_split(request.split, list(splits))  # before anything is downloaded
        files = splits.get(request.split)
        # Our readers cannot read a file whose records are nested inside it, as the dataset's card declares.
        if not files or getattr(builder.config, "field", None) or not all(map(is_raw, files)):
            return self._through_datasets(request, request.dataset, {"name": request.subset, **given}, local)
        if local:
            return self._raw(request, [Path(file) for file in files])
        if not all(HUB_FILE.fullmatch(file) for file in files):
            return self._through_datasets(request, request.dataset, {"name": request.subset, **given}, local)
        return self._from_hub(request, files)

    def _from_hub(self, request: Request, files: Sequence[str]) -> Records:
        """Files of one commit, downloaded to the cache of `huggingface_hub` if missing."""
        places = [match.groupdict() for file in files if (match := HUB_FILE.fullmatch(file))]
        with ThreadPoolExecutor(self.workers) as pool:
            downloads = pool.map(lambda place: self._download(request, **place), places)
            try:
                paths = list(progress(downloads, what="downloading", total=len(places), unit="files"))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        described = request.describe() | {"hub_files": list(files)}
        return FileRecords(paths, content_key("hub", list(files)), described)

    def _download(self, request: Request, repo: str, revision: str, path: str) -> Path:
        from huggingface_hub import hf_hub_download

        def fetch() -> str:
            return hf_hub_download(repo, path, repo_type="dataset", revision=revision)

        try:
            return Path(self.backoff(f"{repo}/{path}", fetch))
        except UserError:
            raise
        except Exception as error:
            raise _load_error(request, error) from error

    def _through_datasets(self, request: Request, path: str, given: dict[str, Any], local: bool = True) -> Records:
        from datasets import load_dataset

        _silence_datasets()
        workers = self.workers if self.workers > 1 else None
        table = self._ask(
            request, local, lambda: load_dataset(path, split=request.split, num_proc=workers, **given), check=False
        )
        return self._table(request, table, request.dataset)

    def _table(self, request: Request, table: Any, name: str) -> Records:
        files = [Path(file["filename"]) for file in table.cache_files]
        # The fingerprint distinguishes slices and orders of the same files; a table without files has only that.
        key = self.stamps.key(files, request.split, len(table), table._fingerprint)
        return TableRecords(table, name, key, request.describe(), self.batch_size)

    def _ask(self, request: Request, local: bool, action: Callable[[], Any], check: bool = True) -> Any:
        try:
            if check and not local:
                _require_network()
            return self.backoff(request.dataset, action)
        except UserError:
            raise
        # What `datasets` raises for something it cannot find or read is a long and changing list.
        except Exception as error:
            raise _load_error(request, error) from error


def _silence_datasets() -> None:
    """No redrawn bars in log files, and no warnings of `datasets`, which would be about our own calls."""
    import datasets
    from huggingface_hub.utils import disable_progress_bars

    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        disable_progress_bars()


def _require_network() -> None:
    """Fail within seconds without a network; in offline mode the caches are used."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        require_hub()


def _local_files(request: Request) -> list[Path]:
    """The local files that `--data-files` or `--dataset` names; none when these name something else."""
    names = request.data_files
    if not names:
        path = Path(request.dataset).expanduser()
        if path.is_file():
            return [path]
        names = (request.dataset,) if glob.has_magic(request.dataset) else ()
    found: list[list[Path]] = [_expand(name) for name in names]
    if found and all(found):
        return [path for files in found for path in files]
    absent = [name for name, files in zip(names, found) if not files]
    if any(found) or (absent and absent[0].startswith((os.sep, "~", "."))) or (absent and not request.data_files):
        raise UserError(f"{absent[0]}: no such file")
    return []


def _expand(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())


def _saved_folder(path: Path, split: str) -> Path | None:
    """The folder of a split written by `save_to_disk`, None when `path` is not such a folder."""
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return path
    if not (path / "dataset_dict.json").is_file():
        return None
    _require_split(split, sorted(file.parent.name for file in path.glob("*/state.json")))
    return path / _split_name(split)


def _saved_table(folder: Path, split: str) -> Any:
    """The `datasets.Dataset` in a folder, or the slice of it that `split` names."""
    from datasets import ReadInstruction, load_from_disk

    _silence_datasets()
    try:
        table = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--dataset {folder}: cannot be loaded ({type(error).__name__}: {error})") from error
    name = _split_name(split)
    if table.split is not None:
        _require_split(split, [_split_name(str(table.split))])
    if name == split:
        return table
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({name: len(table)})
    except ValueError as error:
        raise UserError(f"--split {split}: {error}") from error
    return table.select(range(part.from_, part.to))


def _require_split(split: str, splits: list[str]) -> None:
    if _split_name(split) not in splits:
        close = nearest(_split_name(split), splits)
        raise UserError(f"--split {split}: no such split.{close} The dataset has: {', '.join(splits)}")


def _split_name(split: str) -> str:
    """The split's name without its slice: `train` of `train[:10%]`."""
    found = re.match(r"\w+", split)
    return found[0] if found else split


def _load_error(request: Request, error: BaseException) -> UserError:
    text = str(error).strip()
    cause = str(error.__cause__ or "").strip()
    lines = [line.strip() for line in text.splitlines()[:2]] + ([cause.splitlines()[0]] if cause else [])
    reason = " ".join(line for line in lines if line) or type(error).__name__
    return UserError(
        f"--dataset {request.dataset}: cannot be loaded ({type(error).__name__}: {reason}){_hint(error, text)}"
    )


def _hint(error: BaseException, text: str) -> str:
    if "Config name is missing" in text or "BuilderConfig" in text:
        return ". Pick one with --subset"
    if "split" in text.lower():
        return ". Pick one with --split"
    if "script" in text.lower():
        return ". Try the Hub's own conversion: --revision refs/convert/parquet"
    if type(error).__name__ == "DatasetNotFoundError":
        return ". Check the name; private and gated datasets need `hf auth login`"
    if isinstance(error, ConnectionError):
        return ". Without a network, give local files or a folder: --dataset corpus.jsonl"
    return ""
