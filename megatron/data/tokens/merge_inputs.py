"""Which datasets are merged into which: the `--input` of `merge_datasets.py`.

Shards of a run are grouped by what follows the shard in their names (`_text_document`, `_messages_label_document`)
and each group becomes one dataset. Other datasets become one, and their labels and rewards, if they have such
companions, one each.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.data.tokens.partial import PARTIAL
from megatron.data.tokens.prefixes import SHARD_NAME
from megatron.errors import UserError

COMPANIONS = ("_label_document", "_reward_document")
SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Group:
    """Datasets that become the one called `output`, in this order; `shards`: whether they are all those of a run."""

    output: str
    prefixes: tuple[str, ...]
    shards: bool = False


def find_groups(inputs: Sequence[str], output: str) -> list[Group]:
    """The groups of what `inputs` name: folders, prefixes, globs.

    `output` is the name of the result: in full, or (shards only) without what follows the shard's number in theirs.
    A dataset that is named several times itself is written as often; one that folders and globs find again is not.
    The result itself is never a part. Raises `UserError`: no dataset, half a dataset, shards missing, twice or of
    different runs, shards and other datasets together, datasets without the companion that others have.
    """
    named = Counter(_abs(next(iter(_datasets_in(name)))) for name in inputs if _is_name(name))
    once = {_abs(prefix): prefix for name in reversed(inputs) for prefix in _datasets_in(name)}
    found = [prefix for path, prefix in once.items() for _ in range(max(1, named[path]))]
    found = sorted(sorted(found), key=_natural)  # 3 and 00003
    shards = [prefix for prefix in found if SHARD_NAME.search(Path(prefix).name)]
    groups = _of_shards(shards, output) if shards else _of_others(found, output)
    results = {os.path.abspath(group.output) for group in groups}
    if shards and (others := [prefix for prefix in found if prefix not in shards and _abs(prefix) not in results]):
        raise UserError(
            f"--input: shards ({_some(shards[:1])}, ...) and other datasets ({_some(others)}) together; name one kind, "
            f"such as --input '{_around(shards[0])[0]}_shard_*'"
        )
    groups = [Group(g.output, tuple(p for p in g.prefixes if _abs(p) not in results), g.shards) for g in groups]
    groups = [group for group in groups if group.prefixes]
    if not groups:
        raise UserError(f"--input: no .bin/.idx datasets in {', '.join(inputs)}")
    return groups


def _abs(prefix: str) -> str:
    return os.path.abspath(prefix)


def _is_name(name: str) -> bool:
    """Whether it is the name of one dataset, neither a folder nor a glob."""
    return not Path(name).expanduser().is_dir() and not glob.has_magic(name)


def _datasets_in(name: str) -> Iterable[str]:
    path = Path(name).expanduser()
    if path.is_dir():
        files = [str(file) for end in (".bin", ".idx") for file in path.glob(f"*{end}")]
    else:
        base = str(path).removesuffix(".bin").removesuffix(".idx")
        pattern = base if glob.has_magic(base) else glob.escape(base)
        files = [file for end in (".bin", ".idx") for file in glob.glob(pattern + end)]
        if not files:
            raise UserError(f"--input: {name} is neither a folder nor a dataset")
    halves = {end: {file.removesuffix(end) for file in files if file.endswith(end)} for end in (".bin", ".idx")}
    for prefix in sorted(halves[".bin"] ^ halves[".idx"]):
        lacking = ".bin" if prefix in halves[".idx"] else ".idx"
        raise UserError(f"{prefix}{lacking} is missing: the dataset is incomplete")
    return halves[".idx"]


def _of_shards(shards: Sequence[str], output: str) -> list[Group]:
    runs: dict[str, dict[str, list[str]]] = {}
    for prefix in shards:
        base, suffix = _around(prefix)
        runs.setdefault(base, {}).setdefault(suffix, []).append(prefix)
    if len(runs) > 1:
        raise UserError(
            f"--input: shards of several runs ({_some(list(runs))}); name one run, such as "
            f"--input '{next(iter(runs))}_shard_*'"
        )
    (by_suffix,) = runs.values()
    named = next((suffix for suffix in by_suffix if suffix and output.endswith(suffix)), "")
    base = output.removesuffix(named)
    return [Group(base + suffix, _complete(prefixes), shards=True) for suffix, prefixes in sorted(by_suffix.items())]


def _complete(prefixes: Sequence[str]) -> tuple[str, ...]:
    """The shards in order of their numbers. Raises `UserError` unless each exists once."""
    by_index: dict[int, str] = {}
    first = prefixes[0]
    counts = {int(_numbers(prefix)["count"]): prefix for prefix in prefixes}
    if len(counts) > 1:
        raise UserError(f"shards of runs with different numbers of them: {_some(list(counts.values()))}")
    (count,) = counts
    for prefix in prefixes:
        index = int(_numbers(prefix)["index"])
        if index in by_index:
            raise UserError(f"shard {index} of {count} exists twice: {by_index[index]} and {prefix}")
        if index >= count:
            raise UserError(f"{prefix}: shards are counted from 0, so there is no shard {index} of {count}")
        by_index[index] = prefix
    missing = [index for index in range(count) if index not in by_index]
    if missing:
        raise UserError(_missing(first, missing, count))
    return tuple(by_index[index] for index in range(count))


def _missing(example: str, missing: Sequence[int], count: int) -> str:
    base, suffix = _around(example)
    more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
    which = ", ".join(str(index) for index in missing[:SHOWN]) + more
    begun = [i for i in missing if glob.glob(glob.escape(f"{base}_shard_{i:05d}_of_{count:05d}") + f"*{PARTIAL}")]
    stopped = f" Not finished: {', '.join(map(str, begun[:SHOWN]))}." if begun else ""
    return (
        f"{base}_shard_*{suffix}: of {count} shards, {which} (counted from 0) {'is' if len(missing) == 1 else 'are'} "
        f"missing.{stopped} Make them with the command of the others and --shard {missing[0]}/{count}"
    )


def _of_others(found: Sequence[str], output: str) -> list[Group]:
    results = {_abs(output)} | {_abs(_companion(output, kind)) for kind in COMPANIONS}
    found = [prefix for prefix in found if _abs(prefix) not in results]
    main = [prefix for prefix in found if not prefix.endswith(COMPANIONS)]
    if not main:
        return [Group(output, tuple(found))]
    groups = [Group(output, tuple(main))]
    for kind in COMPANIONS:
        if there := [prefix for prefix in found if prefix.endswith(kind)]:
            wanted = [_companion(prefix, kind) for prefix in main]
            odd = sorted(set(wanted) ^ set(there))
            if odd:
                whose = "is missing next to its data" if odd[0] in wanted else "has no data next to it"
                raise UserError(f"{odd[0]} {whose}: either all datasets have a companion ...{kind}, or none")
            groups.append(Group(_companion(output, kind), tuple(wanted)))
    return groups


def _companion(prefix: str, kind: str) -> str:
    return prefix.removesuffix("_document") + kind


def _around(prefix: str) -> tuple[str, str]:
    """The parts of a prefix before and after the shard's number."""
    name = Path(prefix).name
    match = _numbers(prefix)
    return str(Path(prefix).parent / name[: match.start()]), name[match.end() :]


def _numbers(prefix: str) -> re.Match[str]:
    match = SHARD_NAME.search(Path(prefix).name)
    if match is None:
        raise ValueError(prefix)
    return match


def _some(names: Sequence[str]) -> str:
    return ", ".join(Path(name).name for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
