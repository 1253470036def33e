"""`save` and `load` in an S3 bucket, as the local folder and the place in the bucket that they mean.

    save: s3://bucket/path/NAME   is   save: NAME            s3_path: s3://bucket/path
    load: s3://bucket/path/NAME   is   load: bucket-path-NAME.s3       s3_load: s3://bucket/path/NAME

The folder of `load` is next to that of `save`. What has been read never has an address in `save` or `load`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from megatron.errors import UserError
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.problems import Problems

PLACE = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9.-]+(/.*)?")
_ADDRESS = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9.-]+(/[^/]+)*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_STEP = re.compile(r"(?P<place>.*)/(?P<step>global_step\d{1,18})")


def to_local_places(values: dict[str, Any], sources: dict[str, str], found: Problems) -> list[str]:
    """Put folders in the place of addresses in `save` and `load`, and set `s3_path` and `s3_load`.

    Returns notes for the start of the run. What is wrong is added to `found`.
    """
    notes: list[str] = []
    with found.collect("save", "s3_path"):
        if (address := _address("save", values, sources, "s3_path")) is not None:
            place, _, name = address.rpartition("/")
            if not PLACE.fullmatch(place) or _STEP.fullmatch(address):
                raise _wrong("save", values, sources)
            values["save"], values["s3_path"], sources["s3_path"] = name, place, sources["save"]
            notes.append(
                f"{sources['save']}: save: {address}: checkpoints are written to {os.path.join('.', name)}, the folder "
                f"of this run, and sent from there (as save: {name} with s3_path: {place})"
            )
    with found.collect("load", "s3_load"):
        if (address := _address("load", values, sources, "s3_load")) is not None:
            save, step = values.get("save"), _STEP.fullmatch(address)
            if save is not None and values.get("s3_path") is not None and address == place_of_save(values):
                values["load"] = save  # whose newest checkpoint is fetched, when it is not there
                return notes
            if step is not None and not PLACE.fullmatch(step["place"]):
                raise _wrong("load", values, sources)
            place = address if step is None else step["place"]
            folder = copy_folder(place, save)
            values["load"] = folder if step is None else os.path.join(folder, step["step"])
            values["s3_load"], sources["s3_load"] = address, sources["load"]
    return notes


def tell_no_copies(before: Entry | None, entries: Mapping[str, Entry]) -> list[str]:
    """A note where an override of `save`, which was an address, leaves checkpoints without copies in a bucket."""
    after, path = entries.get("save"), entries.get("s3_path")
    lost = before is not None and _is_address(before.value) and after is not None and after.value
    if before is None or not lost or _is_address(after.value) or (path is not None and path.value):
        return []
    place = str(before.value).rstrip("/").rpartition("/")[0]
    return [
        f"save={after.value} wins over save: {before.value} ({before.where}): checkpoints are not sent to a bucket "
        f"(s3_path={place} sends them there, below the name of the folder)"
    ]


def copy_folder(place: str, save: str | None) -> str:
    """Where what is loaded from a place in a bucket arrives: next to `save`, else in the current folder."""
    name = place.removeprefix("s3://").replace("/", "-")
    return os.path.join(os.path.dirname((save or "").rstrip("/")), f"{name}.s3")


def place_of_save(values: Mapping[str, Any]) -> str:
    """Where the checkpoints of a run with `save` and `s3_path` are in the bucket."""
    return f"{values['s3_path'].rstrip('/')}/{os.path.basename(os.path.abspath(values['save']))}"


def step_in(address: str) -> str | None:
    """The last part of an address, when it is the name of a checkpoint's folder."""
    found = _STEP.fullmatch(address.rstrip("/"))
    return found["step"] if found else None


def _address(key: str, values: dict[str, Any], sources: dict[str, str], other: str) -> str | None:
    """The address in `key`, without a slash at its end; None when it is a folder. Raises `UserError`."""
    value = values.get(key)
    if not _is_address(value):
        return None
    address = value.rstrip("/")
    if not _ADDRESS.fullmatch(address) or os.path.basename(address) in (".", ".."):
        raise _wrong(key, values, sources)
    if values.get(other) is not None:
        raise UserError(
            f"{sources[key]}: {key}: {value} is a place in a bucket, and {other} ({sources.get(other)}) is set, too; "
            "keep one of the two"
        )
    return address


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and _SCHEME.match(value) is not None


def _wrong(key: str, values: dict[str, Any], sources: dict[str, str]) -> UserError:
    return UserError(
        f"{sources[key]}: {key}: expected a folder or s3://bucket/path/NAME, got {values[key]!r} (other stores that "
        "speak S3: s3:// as well, with their endpoint in AWS_ENDPOINT_URL_S3)"
    )
