"""Prepare a Hugging Face dataset for training: load, find the column, count, export, tokenise.

A stage whose inputs did not change is not repeated, so an interrupted or changed command does only the missing work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.hub.dataset_loader import BUILDERS, Loader
from megatron.data.hub.encoding import ChatEncoding, TextEncoding, TokenizerChoice
from megatron.data.hub.layout import Layout, Unusable, detect
from megatron.data.hub.records import Records, Request, Stamps, content_key, sha256_file
from megatron.data.hub.results import Results
from megatron.data.hub.retry import Backoff
from megatron.data.hub.stages import RenderedChunk, Renderer, count, export
from megatron.data.tokenise.chunks import Record
from megatron.data.tokenise.command import CommandOptions, check_folder, tokenise_files, write_metadata
from megatron.data.tokenise.compression import COMPRESSIONS
from megatron.data.tokenise.encode import Tally
from megatron.data.tokenise.formats import READERS
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import verify
from megatron.errors import DeepyError, UserError
from megatron.log import get_logger
from megatron.tokenizer import Tokenizer

EXPORT_NAME = "dataset.jsonl"

logger = get_logger(__name__)


@dataclass(frozen=True)
class PrepareOptions:
    """The flags of `prepare_hf_dataset.py`; names as there."""

    request: Request
    output_dir: Path
    vocab_file: str | None = None
    hf_tokenizer: str | None = None
    chat_template: str | None = None
    text_column: str | None = None
    join_columns: tuple[str, ...] = ()
    skip_count: bool = False
    skip_tokenize: bool = False
    count_only: bool = False
    skip_chat_template: bool = False
    midtrain_chat_messages: bool = False
    skip_bad_lines: bool = False
    num_proc: int = 1
    batch_size: int = 10000
    tokenize_workers: int = 1
    download_workers: int = 1


def output_name(request: Request) -> str:
    """`<dataset tail>[_<subset>]_<split>`, without characters that file names should not have."""
    tail = Path(request.dataset).absolute().name  # also of "."
    for ending in (*COMPRESSIONS, *READERS, *BUILDERS):
        if len(tail) > len(ending) and tail.lower().endswith(ending):
            tail = tail[: -len(ending)]
    parts = [tail, *([request.subset] if request.subset else []), request.split]
    return "_".join(re.sub(r"[^\w.+-]+", "-", part).strip("-") for part in parts)


def prepare_hf_dataset(options: PrepareOptions, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Run the stages that are asked for; returns the content of `pipeline_results.json`.

    `sleep` waits (seconds) when the Hub refuses. Raises `UserError` for wrong input; the output folder then holds the
    stages done so far, each complete, or does not exist.
    """
    if not options.count_only:
        check_folder(options.output_dir, f"output folder {options.output_dir}")
    results = Results(options.output_dir)
    try:
        return _Pipeline(options, results, Backoff(sleep)).run()
    except BaseException as error:
        if not options.count_only:
            known = isinstance(error, DeepyError)
            results.write("failed", str(error) if known else f"{type(error).__name__}: {error}")
        raise


class _Pipeline:
    """One run over one dataset."""

    def __init__(self, options: PrepareOptions, results: Results, backoff: Backoff) -> None:
        self.options, self.results, self.backoff = options, results, backoff
        self.started = time.monotonic()
        self.proven = False
        self.prefix = str(options.output_dir / options.output_dir.name)
        self.export_path = options.output_dir / EXPORT_NAME

    def run(self) -> dict[str, Any]:
        """The five stages in order."""
        options, results = self.options, self.results.values
        results |= {name: getattr(options.request, name) for name in ("dataset", "subset", "split")}
        results["output_dir"] = str(options.output_dir)
        needs_tokenizer = options.count_only or not (options.skip_count and options.skip_tokenize)
        if needs_tokenizer:
            _ = self._tokenizer  # fail now, not after hours of loading
        logger.info(f"[1/5] LOAD {options.request.dataset}")
        records = self._load()
        logger.info(f"[2/5] DETECT {len(records.columns)} columns: {', '.join(records.columns)}")
        layout = self._detect(records)
        if needs_tokenizer:  # likewise: without a chat template or eod
            self._encoding(layout).encoder(append_eod=not (options.count_only or options.skip_tokenize))
        if options.skip_count and not options.count_only:
            logger.info("[3/5] COUNT skipped (--skip-count)")
            results["token_count"] = None
        else:
            self._count(records, layout)
        if options.count_only:
            results |= {"status": "completed", "elapsed_time": round(time.monotonic() - self.started, 3)}
            return results
        digest = self._export(records, layout)
        results["tokenized"] = False
        if options.skip_tokenize:
            logger.info("[5/5] TOKENIZE skipped (--skip-tokenize)")
        else:
            self._tokenize(digest, records, layout)
        results["elapsed_time"] = round(time.monotonic() - self.started, 3)
        self.results.write("completed")
        return results | {"status": "completed"}

    @cached_property
    def _tokenizer(self) -> tuple[Tokenizer, Path]:
        return TokenizerChoice(self.options.vocab_file, self.options.hf_tokenizer).resolve(self.backoff)

    # ---- stages

    def _load(self) -> Records:
        options, results = self.options, self.results
        stamps = Stamps(results.stamps)
        loader = Loader(self.backoff, options.download_workers, options.batch_size, stamps)
        request = asdict(options.request) | {"data_files": list(options.request.data_files)}
        try:
            records = loader.load(options.request)
        except UserError as error:
            if not results.hub_files or results.request != request or not isinstance(error.__cause__, ConnectionError):
                raise
            logger.warning(
                f"{options.request.dataset}: the Hub does not answer; using the files of the earlier "
                f"command ({error.__cause__})"
            )
            records = loader.load_cached(options.request, results.hub_files)
        results.request, results.hub_files = request, list(records.description.get("hub_files", []))
        results.stamps = {name: list(stamp) for name, stamp in stamps.seen.items()}
        rows = "" if records.documents is None else f"{records.documents} rows, "
        logger.info(f"loaded: {rows}{records.nbytes / 1e6:.1f} MB")
        return records

    def _detect(self, records: Records) -> Layout:
        options = self.options
        layout = detect(
            records.columns,
            records.sample,
            join_columns=options.join_columns,
            text_column=options.text_column,
            midtrain=options.midtrain_chat_messages,
            skip_template=options.skip_chat_template,
        )
        made_of = {"text": "texts", "messages": "chats", "join": "columns joined by a blank line"}[layout.kind]
        how = {"midtrain": ", flattened to their contents", "plain": ", written out as text"}.get(layout.flatten, "")
        logger.info(f"{', '.join(layout.columns)}: {made_of}{how}")
        is_messages = layout.kind == "messages"
        self.results.values |= {"text_column": ",".join(layout.columns), "is_messages": is_messages}
        if layout.columns == ("text",) and not options.text_column and "messages" in records.columns:
            logger.info("the data has a column messages too: --text-column messages uses its chats")
        if not is_messages and options.skip_chat_template:
            logger.info("--skip-chat-template has no effect on texts")
        return layout

    def _count(self, records: Records, layout: Layout) -> None:
        encoding = self._encoding(layout)
        key = content_key("count", records.key, asdict(layout), encoding.describe(), self.options.skip_bad_lines)
        found = self.results.done("count", key)
        if found is not None:
            logger.info(f"[3/5] COUNT done already: {found['token_count']} tokens")
        else:
            logger.info("[3/5] COUNT")
            self._prove(encoding, records, layout)
            renderer, encoder = self._renderer(records, layout), encoding.encoder(append_eod=False)
            tally, trained = count(renderer, encoder, self.options.num_proc)
            _log_faults(tally)
            documents = tally.documents[0]
            added = encoding.count_added() * documents  # not part of the texts
            found = {
                "num_documents": documents,
                "token_count": tally.tokens[0] - added,
                "trained_tokens": trained - added,
            }
            if not self.options.count_only:
                found = self.results.finish("count", key, **found)
        found = {name: value for name, value in found.items() if name != "key"}
        self.results.values |= found
        self.results.values["tokens_per_doc"] = round(found["token_count"] / found["num_documents"], 2)

    def _export(self, records: Records, layout: Layout) -> str:
        key = content_key("export", records.key, asdict(layout), self.options.skip_bad_lines)
        path = self.export_path
        found = self.results.done("export", key)
        if found is not None and _is_unchanged(path, found):
            logger.info(f"[4/5] EXPORT done already: {path}")
        else:
            logger.info(f"[4/5] EXPORT {path}")
            tally, digest = export(self._renderer(records, layout), path, self.options.num_proc)
            if self.options.skip_count:  # else they are logged already
                _log_faults(tally)
            stat = path.stat()
            found = self.results.finish(
                "export",
                key,
                sha256=digest,
                size=stat.st_size,
                changed=stat.st_mtime_ns,
                num_documents=tally.documents[0],
                empty_documents=tally.empty[0],
                bad_records=tally.faults,
            )
        self.results.values |= {n: found[n] for n in ("num_documents", "empty_documents", "bad_records")}
        self.results.values["jsonl_path"] = str(path)
        return found["sha256"]

    def _tokenize(self, digest: str, records: Records, layout: Layout) -> None:
        encoding = self._encoding(layout)
        key = content_key("tokenize", digest, encoding.describe())
        found = self.results.done("tokenize", key)
        if found is not None and all(_is_complete(prefix) for prefix in found["prefixes"]):
            logger.info("[5/5] TOKENIZE done already")
        else:
            logger.info(f"[5/5] TOKENIZE {self.prefix}")
            self._prove(encoding, records, layout)
            result = tokenise_files(
                [self.export_path],
                encoding.encoder(append_eod=True),
                self.prefix,
                CommandOptions(workers=self.options.tokenize_workers),
                settings=encoding.describe(),
                skip_bad=self.options.skip_bad_lines,
                source=records.description,
            )
            write_metadata(self.prefix, asdict(self.options.request), result)
            first = next(iter(result.datasets.values()))
            found = self.results.finish(
                "tokenize",
                key,
                prefixes=list(result.datasets),
                documents=first.documents,
                tokens=first.tokens,
                seconds=round(result.seconds, 3),
            )
        data, *labels = found["prefixes"]
        self.results.values["vocab_file"] = self.options.vocab_file or str(self._tokenizer[1])
        results = {"tokenized": True, "tokenize_time": found["seconds"], "tokens_written": found["tokens"]}
        results["documents_written"] = found["documents"]
        results |= {"data_path": data, "bin_path": f"{data}.bin", "idx_path": f"{data}.idx"}
        if labels:
            results |= {"label_data_path": labels[0], "label_bin_path": f"{labels[0]}.bin"}
        self.results.values |= results

    # ---- shared by stages

    def _renderer(self, records: Records, layout: Layout) -> Renderer:
        return Renderer(records, layout, self.options.skip_bad_lines)

    def _encoding(self, layout: Layout) -> TextEncoding | ChatEncoding:
        tokenizer, folder = self._tokenizer
        if layout.key == "text":
            return TextEncoding(tokenizer)
        return ChatEncoding.of(tokenizer, folder, self.options.chat_template, self.options.skip_bad_lines)

    def _prove(self, encoding: TextEncoding | ChatEncoding, records: Records, layout: Layout) -> None:
        """Once per command, and only when there is something to tokenise."""
        if not self.proven:
            encoding.prove(_first_lines(records, layout))
            self.proven = True


def _log_faults(tally: Tally) -> None:
    tally.log_faults()
    tally.log_left_out()


def _first_lines(records: Records, layout: Layout) -> RenderedChunk:
    """The first lines of the export."""
    lines: list[Record] = []
    for record in records.sample:
        with suppress(Unusable):
            if (line := layout.render(record)) is not None:
                lines.append(Record("", line))
    return RenderedChunk(lines, 0)


def _is_unchanged(path: Path, found: dict[str, Any]) -> bool:
    """Whether a file is as it was written; its content is read only when its time differs."""
    if not path.is_file() or path.stat().st_size != found["size"]:
        return False
    return path.stat().st_mtime_ns == found["changed"] or sha256_file(path) == found["sha256"]


def _is_complete(prefix: str) -> bool:
    """Whether a dataset is complete and agrees with its manifest."""
    try:
        return len(IndexedDataset(prefix)) > 0 and verify(prefix) is not None
    except UserError:
        return False
