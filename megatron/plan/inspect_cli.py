"""What tools/datasets/inspect.py does: documents, samples and steps, to a terminal, as JSON or as a page."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron import log
from megatron.cluster.launch import ranks_of_hostfile
from megatron.data.view.content import View
from megatron.data.view.documents import Documents, open_documents
from megatron.data.view.html import page, write_page
from megatron.data.view.origin import OriginPiece, samples_with
from megatron.data.view.terminal import Style, lines
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.problems import collector
from megatron.plan.inspect_arguments import closed_range, parse, python_range
from megatron.plan.inspect_run import RoleData, RunData, open_run
from megatron.plan.preflight import config_for
from megatron.tokenizer import Tokenizer, create_tokenizer

_PAGE_SAMPLES = 20


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Run a command line. Raises `UserError`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # data holds what a terminal's encoding may lack
    known = parse(argv)
    log.configure(level="WARNING")
    {"documents": _documents, "sample": _sample, "steps": _steps}[known.command](known, env)


# ---- documents


def _documents(known: argparse.Namespace, env: Mapping[str, str]) -> None:
    tokenizer = _tokenizer(known)
    found = open_documents(known.prefix, tokenizer, labels=known.labels, eod=known.npy_eod, dtype=known.npy_dtype)
    chosen = python_range(known.documents, len(found.data), "--documents")
    if known.json:
        _print_json(_of_document(found, index, tokenizer) for index in chosen)
        return
    views = (view for index in chosen for view in found.views(index))
    facts = [
        ("dataset", str(found.data.prefix)),
        ("documents", f"{chosen.start:,} to {chosen.stop - 1:,} of {len(found.data):,}"),
        ("labels", str(found.labels.prefix) if found.labels is not None else "none: all is trained"),
    ]
    _show(known, env, f"Documents of {found.data.prefix}", facts, views, tokenizer)


def _of_document(found: Documents, index: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    sides = {}
    for name, view in zip(found.names, found.views(index), strict=True):
        sides[name] = {"tokens": view.tokens.tolist(), "trained": view.trained.astype(int).tolist()}
        if tokenizer is not None:
            sides[name]["text"] = tokenizer.detokenize(view.tokens.tolist())
    reward = found.reward(index)
    record = {"document": index} | ({"reward": reward} if reward is not None else {})
    return record | (sides if len(sides) > 1 else next(iter(sides.values())))


def _tokenizer(known: argparse.Namespace) -> Tokenizer | None:
    kind = known.tokenizer_type
    if kind is None and known.vocab_file is None:
        if known.html:
            raise UserError("--html: a page needs a tokenizer: --vocab-file, or --tokenizer-type")
        return None
    default = "GPT2BPETokenizer" if known.merge_file else "HFTokenizer"
    return create_tokenizer(kind or default, known.vocab_file, known.merge_file)


# ---- samples and steps of a run


def _sample(known: argparse.Namespace, env: Mapping[str, str]) -> None:
    run, role = _run(known, env)
    if known.samples is not None:
        if known.samples < 1 or (known.sample or known.steps or known.iterations):
            raise UserError("--samples N: N at least 1, and without --sample, --step and --iteration")
        chosen: Sequence[int] = _spread(role, known.samples)
    elif known.html and not (known.sample or known.steps or known.iterations):
        chosen = _spread(role, _PAGE_SAMPLES)
    else:
        chosen = list(_choose(known, role) or _spread(role, 1))
    if known.json:
        _print_json(_of_sample(run, role, number) for number in chosen)
        return
    facts = [
        ("run", " ".join([*known.conf, *known.overrides])),
        ("order", run.start),
        ("samples", f"{len(chosen):,} of {role.count:,} of {role.name}, {role.steps.batch} in a step"),
        ("tokenizer", run.tokenizer.describe()),
    ]
    views = (view for n in chosen for view in run.views(role, n).values())
    _show(known, env, f"Samples of {' '.join(known.conf)}", facts, views, run.tokenizer)


def _of_sample(run: RunData, role: RoleData, number: int) -> dict[str, Any]:
    rows = {name: _of_row(run, view) for name, view in run.views(role, number).items()}
    return _where(role, number, rank=True) | (rows.get("") or rows)


def _of_row(run: RunData, view: View) -> dict[str, Any]:
    assert view.positions is not None and view.targets is not None
    return {
        "tokens": view.tokens[:-1].tolist(),
        "targets": view.targets.tolist(),
        "mask": view.trained[1:].astype(int).tolist(),
        "positions": view.positions.tolist(),
        "doc_ids": None if view.doc_ids is None else view.doc_ids.tolist(),
        "length": view.real,
        "text": run.tokenizer.detokenize(view.tokens[: view.real].tolist()),
    }


def _steps(known: argparse.Namespace, env: Mapping[str, str]) -> None:
    run, role = _run(known, env)
    numbers: Iterable[int] | None = _choose(known, role)
    if known.find:
        file, colon, which = known.find.rpartition(":")
        if not colon:
            raise UserError(f"--find {known.find}: give FILE:DOC, such as data/chats_messages_document:17")
        everything = range(role.steps.known[0][1], role.count) if numbers is None else list(numbers)
        numbers = samples_with(role.plan, role.dataset, everything, file, closed_range(which, "--find"))
    if numbers is None:
        raise UserError("choose one: --steps A..B, --iterations A..B, --sample K or --find FILE:DOC")
    if known.json:
        _print_json(_where(role, number, known.rank) for number in numbers)
        return
    _list_steps(run, role, numbers, known.rank)


def _list_steps(run: RunData, role: RoleData, numbers: Iterable[int], rank: bool) -> None:
    """A line per sample, under its step; a source's data path is shown the first time."""
    step, shown = -1, set[str]()
    for number in numbers:
        place, origin = role.place(number), role.origin(number)
        if place.step != step:
            step = place.step
            samples = role.steps.samples(step)
            print(f"{run.name_step(role, step)}: samples {samples.start}..{samples.stop - 1} of {role.name}")
        held = [_piece(origin.prefix, piece) for piece in origin.pieces]
        reader = f", rank {place.rank}, micro-batch {place.micro_batch}" if rank else ""
        named = origin.source if origin.source in shown else origin.description
        shown.add(origin.source)
        print(f"  {number} (row {place.row}{reader}) {named}: {' '.join(held) or 'padding'}")
    if step < 0:
        print("no sample of the run holds it")


def _piece(prefix: str, piece: OriginPiece) -> str:
    """`document[begin:end]`, as a slice of its tokens; with its file, where a data path means several."""
    file = "" if piece.file == prefix else f"{piece.file}:"
    return f"{file}{piece.document}[{piece.offset}:{piece.offset + piece.length}]"


def _where(role: RoleData, number: int, rank: bool) -> dict[str, Any]:
    place = role.place(number)
    record: dict[str, Any] = {"role": role.name, "step": place.step}
    if role.name == "train":
        record["iteration"] = place.step + 1
    record |= {"row": place.row, "sample": number}
    if rank:
        record |= {"rank": place.rank, "micro_batch": place.micro_batch}
    return record | {"origin": role.origin(number).record()}


def _run(known: argparse.Namespace, env: Mapping[str, str]) -> tuple[RunData, RoleData]:
    hostfile = [f"hostfile={json.dumps(known.hostfile)}"] if known.hostfile else []
    with collector() as problems:
        args = NeoXArgs.from_files(known.conf, [*known.overrides, *hostfile], known.conf_dir, problems=problems)
        args = config_for(args, "train.py")
        run = open_run(args, ranks_of_hostfile(args, env), problems)
    return run, run.role(known.role)


def _choose(known: argparse.Namespace, role: RoleData) -> Iterable[int] | None:
    """The samples that flags name; None without any."""
    given = [flag for flag in ("sample", "steps", "iterations") if getattr(known, flag)]
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]}: give one of them")
    if known.sample:
        numbers = closed_range(known.sample, "--sample")
        role.check(numbers.start)
        role.check(numbers.stop - 1)
        return numbers
    if known.steps:
        return role.samples_of(closed_range(known.steps, "--steps"))
    if known.iterations:
        counted = closed_range(known.iterations, "--iterations")
        if counted.start < 1:
            raise UserError("--iterations: the log counts from 1")
        return role.samples_of(range(counted.start - 1, counted.stop - 1))
    return None


def _spread(role: RoleData, wanted: int) -> list[int]:
    """`wanted` samples (all, if there are fewer) spread evenly from the first of the run to its last."""
    first = role.steps.known[0][1]
    count = role.count - first
    wanted = min(wanted, count)
    return [first + i * (count - 1) // max(wanted - 1, 1) for i in range(wanted)]


# ---- output


def _show(
    known: argparse.Namespace,
    env: Mapping[str, str],
    title: str,
    facts: Sequence[tuple[str, str]],
    views: Iterable[View],
    tokenizer: Tokenizer | None,
) -> None:
    if known.html and tokenizer is not None:
        rows = list(views)
        write_page(known.html, page(title, facts, rows, tokenizer, known.max_tokens or None))
        print(f"{known.html}: {len(rows)} {'documents' if known.command == 'documents' else 'samples'}")
        return
    color = known.color == "always" or (known.color == "auto" and sys.stdout.isatty() and not env.get("NO_COLOR"))
    style = Style(color=color, ids=known.ids, limit=known.max_tokens or None)
    for view in views:
        for line in lines(view, tokenizer, style):
            print(line)
        print()


def _print_json(records: Iterator[dict[str, Any]]) -> None:
    for record in records:
        print(json.dumps(record, ensure_ascii=False))
