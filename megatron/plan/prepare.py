"""`--prepare`: check all data of a run and build its sample indices, without GPUs and without starting ranks.

What the run would do first on its expensive nodes is done here on any node that sees the files. Imports no torch.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from megatron.checkpoint.start import decide_start
from megatron.data.tokens.cache import Entry, IndexCaches
from megatron.data.tokens.token_files import TokenFiles, find_files, with_eod
from megatron.data.tokens.verify import Report, verify_path
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_trainable, derive
from megatron.neox_arguments.problems import Problems
from megatron.plan import sections
from megatron.plan.preflight import FOR_TOKENIZER, check_data_paths, data_paths, kind_of
from megatron.plan.refusals import check_data_plan, check_fit, warn_of_unknown_ranks
from megatron.run.data import resolve_epochs
from megatron.run.data_table import evaluation_notes
from megatron.tables import size, table
from megatron.tokenizer import Tokenizer, build_tokenizer

LOGGER = get_logger(__name__)


def prepare(args: NeoXArgs, ranks: int | None, user_script: str, problems: Problems | None = None) -> str:
    """Check the data, build what the run would build, and report it.

    Args:
        args: the loaded config.
        ranks: how many a hostfile gives the run, None for the config's. They need not be on this machine;
            only the batch size depends on them.
        problems: found when the config was loaded.

    Raises the `UserError` that the real run would end with, one for all that is wrong with the config, and one for
    every dataset that is not whole.
    """
    if kind_of(user_script) in ("eval", "generate", "serve"):
        raise UserError(f"--prepare builds the sample index of training data, which {user_script} does not use.")
    found = problems or Problems()
    args = derive(args, Facts(num_devices=ranks), found)
    check_trainable(args, found)
    check_data_paths(args, found)
    if found.usable(*FOR_TOKENIZER):
        with found.collect():
            tokenizer = build_tokenizer(args.tokenizer)
    found.raise_all()
    warn_of_unknown_ranks(args, ranks, "the length of the index")
    if not args.data.use_shared_fs:
        LOGGER.warning(
            f"use_shared_fs: false, so this prepares {platform.node()} alone: every other node builds its own index. "
            "Run --prepare on each of them, or set use_shared_fs: true with a data_cache_path that all nodes see."
        )
    paths = [one for path in data_paths(args) for one in find_files(path)]
    LOGGER.info(f"tokenizer {tokenizer.describe()}: {tokenizer.vocab_size} tokens")
    checked = _check_files(args, paths, tokenizer)
    args = resolve_epochs(derive(args, Facts(tokenizer.vocab_size, ranks)), tokenizer)
    start = decide_start(args.checkpoint)
    check_fit(args, start)
    plan = check_data_plan(args, tokenizer, start)
    for row in plan.table():
        LOGGER.info(f"{row.role}: {row.documents:,} documents, {row.tokens:,} tokens in {row.prefix}")
    plan.caches.announce = LOGGER.info
    plan.build()
    training = args.training
    batch = (
        f"train_batch_size {training.train_batch_size} on {args.parallel.world_size} ranks, "
        f"{training.train_iters or 0:,} steps, samples of {args.model.seq_length} tokens"
    )
    parts = [
        sections.with_title("run", [batch, start.message]),
        sections.data(plan.table(), evaluation_notes(plan, training.eval_iters)),
        sections.with_title("documents left out, cut or padded", notes) if (notes := plan.notes()) else [],
        _index_section([*checked.entries, *plan.caches.entries]),
        ["Prepared: the run finds its data as it is here and builds nothing."],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _check_files(args: NeoXArgs, paths: Sequence[str], tokenizer: Tokenizer) -> IndexCaches:
    """Every file is whole, and its ids are in the vocabulary. Returns the caches that opening them took."""
    files = TokenFiles.of(with_eod(args.data, tokenizer.eod))
    reports: list[Report] = []
    for path in dict.fromkeys(paths):
        LOGGER.info(f"checking {path}")
        reports += verify_path(path, vocab_size=tokenizer.vocab_size, files=files)
    faults = [fault for report in reports for fault in report.faults]
    if faults:
        raise UserError("\n  ".join(["the data is not whole:", *faults]) if len(faults) > 1 else faults[0])
    return files.caches


def _index_section(entries: Sequence[Entry]) -> list[str]:
    """Which arrays were built, which were there."""
    seen: dict[object, Entry] = {}
    for entry in entries:
        seen.setdefault(entry.path or entry.name, entry)  # later ones find what the first built
    rows = [
        ("built" if entry.built else "found", size(entry.bytes), f"{entry.seconds:.1f} s", str(entry.path))
        for entry in seen.values()
        if entry.path is not None
    ]
    unwritten = [entry.name for entry in seen.values() if entry.path is None]
    if unwritten:
        raise UserError(
            f"the sample index of {unwritten[0]} could not be kept: its folder cannot be written. "
            "Set data_cache_path to a folder that this node and the run's can use."
        )
    return sections.with_title("sample index", table(("", "size", "time", "entry"), rows))
