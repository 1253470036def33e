"""The dataset that a path in a config means."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.data.tokens.partial import PARTIAL
from megatron.errors import UserError

# The tokenising tool adds `_<key>_document` to the prefix it is given, and people forget one or the other.
SUFFIXES = ("_text_document", "_document")
# How a shard's datasets are called: `<prefix>_shard_00003_of_00016_text_document`.
SHARD_NAME = re.compile(r"_shard_(?P<index>\d+)_of_(?P<count>\d+)")

MAKE_TEXTS = (
    "Make one with `deepy tokenize` (tools/datasets/preprocess_data.py), or with `deepy data corpus stdlib -d ./data`."
)
MAKE_CHATS = "tools/datasets/preprocess_data_with_chat_template.py writes pairs, labels and rewards beside texts."


def exists(prefix: str | Path) -> bool:
    """Whether both files of a dataset exist."""
    return os.path.isfile(f"{prefix}.idx") and os.path.isfile(f"{prefix}.bin")


def unfinished_files(prefix: str | Path) -> list[Path]:
    """The files of a dataset that is being written, or whose writing was stopped."""
    return [path for end in (".bin", ".idx") if os.path.isfile(path := Path(f"{prefix}{end}{PARTIAL}"))]


def find_prefix(path: str | Path, remedy: str = MAKE_TEXTS) -> str:
    """The prefix of the dataset at `path`, which may carry `.bin`/`.idx`, or lack or have too much `_text_document`.

    Raises `UserError`: half a dataset, a comma-joined list, or no dataset (those nearby are listed, and `remedy`).
    """
    path = str(path)
    for prefix in _candidates(path):
        if exists(prefix):
            return prefix
    for prefix in _candidates(path):
        for have, lack in ((".idx", ".bin"), (".bin", ".idx")):
            if os.path.isfile(f"{prefix}{have}"):
                raise UserError(f"{prefix}{lack} is missing next to {prefix}{have}: write the dataset again.")
    for prefix in _candidates(path):
        if (unfinished := next(iter(unfinished_files(prefix)), None)) is not None:
            raise UserError(
                f"the dataset {prefix} is not finished ({unfinished}): wait for the command that writes it, or "
                "run that again if it was stopped."
            )
    if "," in path:
        listed = ", ".join(repr(part.strip()) for part in path.split(","))
        raise UserError(f"no dataset {path!r}. Did you mean a list? Write [{listed}].")
    raise UserError(
        f"data path: no dataset {path!r} (looked for {path}.bin and {path}.idx). {_nearby(Path(path))} {remedy}"
    )


def _candidates(path: str) -> Iterator[str]:
    yield path
    base = path.removesuffix(".bin").removesuffix(".idx")
    yield base
    for suffix in SUFFIXES:
        yield base + suffix
    for suffix in SUFFIXES:
        if base.endswith(suffix):
            yield base.removesuffix(suffix)


def _nearby(path: Path) -> str:
    folder = path if os.path.isdir(path) else path.parent
    if not os.path.isdir(folder):
        return f"The folder {folder} does not exist."
    name = "the working directory" if folder == Path() else folder
    found = sorted({str(file.with_suffix("")) for file in folder.glob("*.idx")})
    if not found:
        below = sorted({str(file.with_suffix("")) for file in folder.glob("*/*.idx")})
        found, where = below, f"below {name}"
    else:
        where = f"in {name}"
    if not found:
        return f"There is no dataset in {name}."
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return f"Datasets {where}: {', '.join(found[:10])}{more}."
