"""A folder that appears whole or not at all: written next to its place under a name with a dot, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.errors import MachineError, UserError, as_shown


def check_free(output: Path, marker: str, overwrite: bool) -> None:
    """Raise `UserError` unless `--output_dir` is new or empty, or an earlier export (it has the file `marker`) that
    may be overwritten."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / marker).is_file():
        raise UserError(f"--output_dir: {output} exists and is not an earlier export; choose another folder")
    if not overwrite:
        raise UserError(f"--output_dir: {output} holds a model already; give --overwrite to replace it")


@contextmanager
def draft_of(output: Path, key: str) -> Iterator[Path]:
    """An empty folder next to `output`, removed at the end unless it was renamed.

    Drafts of processes that were killed are removed first. `key`: the flag that names `output`; raises `UserError`
    naming it when it may not be written, `MachineError` when the disk is full.
    """
    _remove_abandoned(output)
    draft = output.with_name(f".{output.name}.draft-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{key}: {output} cannot be made: {error.strerror}") from error
    try:
        yield draft
    except UserError as error:  # users know only the final name
        raise UserError(str(error).replace(str(draft), str(output))) from error
    except OSError as error:
        if as_shown(error) is None:
            raise
        raise MachineError(f"{key}: cannot write {output}: {error.strerror}. Nothing was published.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, output: Path) -> None:
    """Give the draft its name. An existing folder is renamed first, and removed when the new one is in place."""
    older = output.with_name(f".{output.name}.older-{os.getpid()}")
    if output.exists():
        os.rename(output, older)
    os.rename(draft, output)
    shutil.rmtree(older, ignore_errors=True)


def _remove_abandoned(output: Path) -> None:
    """Remove the drafts of `output` whose process is gone, and restore what such a process had renamed."""
    for left in [*output.parent.glob(f".{output.name}.draft-*"), *output.parent.glob(f".{output.name}.older-*")]:
        number = left.name.rpartition("-")[2]
        if not number.isdigit() or Path(f"/proc/{number}").exists() or not Path("/proc/self").exists():
            continue
        if ".older-" in left.name and not output.exists():
            os.rename(left, output)
        else:
            shutil.rmtree(left, ignore_errors=True)
