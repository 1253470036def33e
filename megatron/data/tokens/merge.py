"""Joining datasets into one: tokens, documents and manifest. Shards of a run become the bytes of one unsharded run.

With a seed the documents of all parts are shuffled (`shuffle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import SUMMED, TURN_ENDS, Manifest, finalize_with_manifest, manifest_path, verify
from megatron.data.tokens.merge_inputs import COMPANIONS, Group
from megatron.data.tokens.pairs import SIDES
from megatron.data.tokens.partial import WriteError
from megatron.data.tokens.prefixes import SHARD_NAME
from megatron.data.tokens.shuffle import SHUFFLED, Order, shuffled_order, write_in_order
from megatron.data.tokens.token_files import JoinedTokens
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer import Fingerprint

OF_PAIRS = tuple(f"_{side}{ending}" for side in SIDES for ending in ("_document", *COMPANIONS))
OPTIONS = ("append_eod", "eod", "ftfy")  # must be equal where a manifest has them

logger = get_logger(__name__)


Report = Callable[[int], None]


def merge_groups(
    groups: Sequence[Group],
    report: Report = lambda nbytes: None,
    *,
    seed: int | None = None,
    longest: int | None = None,
) -> list[Manifest]:
    """Write the documents of each group's datasets, one dataset after the other, as its `output`.

    All results appear when all are complete, and without a seed memory does not grow with the data. A result has a
    tokenizer fingerprint when all its parts have one. `report` is called with the bytes of every block of tokens copied
    (with a seed, also of what is read before that).

    Args:
        seed: shuffle the documents of all parts, labels and rewards with them. Neither the order nor the number of the
            parts changes the tokens then.
        longest: with a seed, cut longer documents into pieces of at most so many tokens; not where there are labels or
            rewards.

    Raises `UserError`, with nothing written: a part is damaged or differs from its manifest; types, tokenizers or
    options differ; shards are of different runs; labels or rewards do not fit the data; one side of pairs would be
    shuffled.
    """
    sides = [prefix for group in groups for prefix in (group.output, *group.prefixes) if prefix.endswith(OF_PAIRS)]
    if seed is not None and sides:
        raise UserError(
            f"--shuffle: {sides[0]} is a side of pairs, and each side would get an order of its own; leave it out: a "
            "run on pairs draws an order of them itself"
        )
    manifests = [[verify(prefix) for prefix in group.prefixes] for group in groups]
    for group, parts in zip(groups, manifests):
        _check(group, parts)
    mains = _find_mains(groups)
    _check_companions(groups, mains)
    with ExitStack() as stack:
        builders = []
        for group in groups:
            builder = IndexedDatasetBuilder(group.output, IndexedDataset(group.prefixes[0]).dtype)
            builders.append(stack.enter_context(builder))
        orders: dict[str, Order] = {}
        try:
            for group, parts, builder in sorted(
                zip(groups, manifests, builders), key=lambda row: row[0].output in mains
            ):
                if seed is None:
                    for prefix, part in zip(group.prefixes, parts):
                        _compare_checksum(prefix, part, builder.append(prefix, report))
                else:
                    datasets = [IndexedDataset(prefix) for prefix in group.prefixes]
                    data = JoinedTokens(datasets, group.output)
                    if group.output in mains:
                        order = orders[mains[group.output].output].of(data)
                    else:
                        order, crcs = shuffled_order(datasets, seed, longest=longest, report=report)
                        orders[group.output] = order
                        for prefix, part, crc in zip(group.prefixes, parts, crcs):
                            _compare_checksum(prefix, part, crc)
                    write_in_order(builder, data, order, report)
                builder.finish()
        except WriteError as error:
            raise WriteError(f"{error} Nothing was written.") from error
        return [
            finalize_with_manifest(
                builder,
                tokenizer=_common_fingerprint(parts),
                source=_source(group, parts) | ({} if seed is None else {SHUFFLED: seed}),
                extra=_extra(parts),
            )
            for group, parts, builder in zip(groups, manifests, builders)
        ]


def _compare_checksum(prefix: str, part: Manifest | None, found: int) -> None:
    expected = part.bin_crc32 if part is not None else None
    if expected is not None and found != expected:
        raise UserError(
            f"{prefix}.bin: its CRC-32 is {found}, but {manifest_path(prefix)} says {expected}: the file was damaged "
            "or replaced after it was written. Nothing was written."
        )


def _check(group: Group, parts: Sequence[Manifest | None]) -> None:
    datasets = [IndexedDataset(prefix) for prefix in group.prefixes]
    first = datasets[0]
    for data in datasets:
        if data.dtype != first.dtype:
            raise UserError(
                f"{data.prefix} stores {data.dtype}, but {first.prefix} {first.dtype}: they cannot be merged"
            )
    if not any(len(data) for data in datasets):
        raise UserError(f"no document in any part of {group.output}. Nothing was written.")
    known = [(prefix, part) for prefix, part in zip(group.prefixes, parts) if part is not None]
    without = [prefix for prefix, part in zip(group.prefixes, parts) if part is None]
    if without:
        logger.warning(f"{without[0]} has no manifest, so the result will not say which tokenizer made it")
    for prefix, part in known:
        base, other = known[0]
        if part.tokenizer and other.tokenizer:
            _check_same_tokenizer(
                prefix, Fingerprint.from_dict(part.tokenizer), base, Fingerprint.from_dict(other.tokenizer)
            )
        for option in OPTIONS:
            if part.extra.get(option) != other.extra.get(option):
                raise UserError(
                    f"{prefix} and {base} were made with different options ({option}: {part.extra.get(option)} and "
                    f"{other.extra.get(option)}): they cannot be merged"
                )
        if group.shards:
            _check_shard(prefix, part, base, other)


def _check_same_tokenizer(prefix: str, its: Fingerprint, base: str, others: Fingerprint) -> None:
    if its != others:
        raise UserError(f"{prefix} and {base} were made with different tokenizers: tokenise one of them again")
    if not its.adds_the_same(others):
        shown = [f"{one.start or ()} ... {one.end or ()}" for one in (its, others)]
        raise UserError(
            f"{prefix} and {base} were made with different starts and ends of their texts ({shown[0]} and {shown[1]}: "
            "ids that the tokenizer puts around each): tokenise one of them again"
        )


def _check_shard(prefix: str, part: Manifest, base: str, other: Manifest) -> None:
    shard, reference = part.extra.get("shard") or {}, other.extra.get("shard") or {}
    if shard.get("run") != reference.get("run"):
        raise UserError(
            f"{prefix} and {base} are shards of different runs (other input files, options or tokenizer): make them "
            "with one command"
        )
    name = SHARD_NAME.search(Path(prefix).name)
    if name and shard and (int(name["index"]), int(name["count"])) != (shard["index"], shard["count"]):
        raise UserError(
            f"{prefix} holds shard {shard['index']} of {shard['count']}: it was renamed. Give its files their old name."
        )


def _find_mains(groups: Sequence[Group]) -> dict[str, Group]:
    """The data of each group of labels or rewards, by the output of that group."""
    by_output = {group.output: group for group in groups}
    names = {f"{group.output.removesuffix('_document')}{kind}": group for group in groups for kind in COMPANIONS}
    return {output: group for output, group in names.items() if output in by_output}


def _check_companions(groups: Sequence[Group], mains: Mapping[str, Group]) -> None:
    for group in groups:
        main = mains.get(group.output)
        for prefix, data in zip(group.prefixes, main.prefixes if main else ()):
            mine, its = IndexedDataset(prefix), IndexedDataset(data)
            rewards = group.output.endswith("_reward_document")
            fits = len(mine) == len(its) if rewards else np.array_equal(mine.sizes, its.sizes)
            if not fits:
                raise UserError(
                    f"{prefix} does not fit {data}: {len(mine)} items of {mine.num_tokens} values, not "
                    f"{len(its)} of {its.num_tokens}"
                )


def _common_fingerprint(parts: Sequence[Manifest | None]) -> Fingerprint | None:
    found = [Fingerprint.from_dict(part.tokenizer) for part in parts if part and part.tokenizer]
    if len(found) < len(parts):
        return None
    return found[0] if all(one.start is not None for one in found) else found[0].without_added()


def _source(group: Group, parts: Sequence[Manifest | None]) -> dict[str, Any]:
    """What one run over all inputs would have written, when the parts say what their inputs were."""
    sources = [part.source for part in parts if part and isinstance(part.source, dict)]
    if len(sources) == len(parts) and all(set(source) == {"files"} for source in sources):
        if group.shards:  # each names the files of all
            return sources[0]
        return {"files": [name for source in sources for name in source["files"]]}
    return {"merged": [Path(prefix).name for prefix in group.prefixes]}


def _extra(manifests: Sequence[Manifest | None]) -> dict[str, Any]:
    """Counts added up, all ends of turns; of the rest, what all parts have. Empty when a part has no manifest."""
    parts = [part for part in manifests if part is not None]
    if len(parts) < len(manifests):
        return {}
    extra = {key: value for key, value in parts[0].extra.items() if all(p.extra.get(key) == value for p in parts)}
    extra.pop("shard", None)
    if ends := {i for part in parts for i in part.extra.get(TURN_ENDS, ())}:
        extra[TURN_ENDS] = sorted(ends)
    return extra | {key: sum(p.extra[key] for p in parts) for key in SUMMED if all(key in p.extra for p in parts)}
