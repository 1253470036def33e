"""A Hugging Face dataset made ready for training in one go: loaded, its column found, counted, exported, tokenised.

Every stage whose input is what it was is left as it is, so an interrupted or changed command goes on where it must.
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

from megatron.data.hub.columns import Layout, Unusable, detect
from megatron.data.hub.load import BUILDERS, Loader
from megatron.data.hub.retry import Backoff
from megatron.data.hub.source import Request, Source, Stamps, content_key, sha256_file
from megatron.data.hub.stages import RenderedChunk, Renderer, count, export, name_faults
from megatron.data.hub.state import PipelineState
from megatron.data.hub.tokenizer import ChatEncoding, TextEncoding, TokenizerChoice
from megatron.data.tokenise.chunks import Record
from megatron.data.tokenise.compression import COMPRESSIONS
from megatron.data.tokenise.corpus_job import JobOptions, check_folder, tokenise_files, write_metadata
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
    """`<dataset tail>[_<subset>]_<split>`, without what is no part of a plain file name."""
    tail = Path(request.dataset).absolute().name  # also of "."
    for ending in (*COMPRESSIONS, *READERS, *BUILDERS):
        if len(tail) > len(ending):
            tail = tail.removesuffix(ending)
    parts = [tail, *([request.subset] if request.subset else []), request.split]
    return "_".join(re.sub(r"[^\w.+-]+", "-", part).strip("-") for part in parts)


def prepare_hf_dataset(options: PrepareOptions, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Run the stages that are asked for; returns what `pipeline_results.json` holds.

    `sleep` waits when the Hub refuses (seconds). Raises `UserError` for whatever the user can mend; the output folder
    then holds the stages done so far, each complete, or does not exist.
    """
    if not options.count_only:
        check_folder(options.output_dir, f"output folder {options.output_dir}")
    state = PipelineState(options.output_dir)
    try:
        return _Pipeline(options, state, Backoff(sleep)).run()
    except BaseException as error:
        if not options.count_only:
            known = isinstance(error, DeepyError)
            state.write("failed", str(error) if known else f"{type(error).__name__}: {error}")
        raise


class _Pipeline:
    """One run over one dataset."""

    def __init__(self, options: PrepareOptions, state: PipelineState, backoff: Backoff) -> None:
        self.options, self.state, self.backoff = options, state, backoff
        self.started = time.monotonic()
        self.proven = False
        self.prefix = str(options.output_dir / options.output_dir.name)
        self.export_path = options.output_dir / EXPORT_NAME

    def run(self) -> dict[str, Any]:
        """The five stages in order."""
        options, results = self.options, self.state.results
        results |= {name: getattr(options.request, name) for name in ("dataset", "subset", "split")}
        results["output_dir"] = str(options.output_dir)
        needs_tokenizer = options.count_only or not (options.skip_count and options.skip_tokenize)
        if needs_tokenizer:
            _ = self._chosen  # what is wrong with it is said before hours of loading
        logger.info(f"[1/5] LOAD {options.request.dataset}")
        source = self._load()
        logger.info(f"[2/5] DETECT {len(source.columns)} columns: {', '.join(source.columns)}")
        layout = self._detect(source)
        if needs_tokenizer:  # likewise: no chat template, no eod
            self._encoding(layout).encoder(append_eod=not (options.count_only or options.skip_tokenize))
        if options.skip_count and not options.count_only:
            logger.info("[3/5] COUNT skipped (--skip-count)")
            results["token_count"] = None
        else:
            self._count(source, layout)
        if options.count_only:
            results |= {"status": "completed", "elapsed_time": round(time.monotonic() - self.started, 3)}
            return results
        digest = self._export(source, layout)
        results["tokenized"] = False
        if options.skip_tokenize:
            logger.info("[5/5] TOKENIZE skipped (--skip-tokenize)")
        else:
            self._tokenize(digest, source, layout)
        results["elapsed_time"] = round(time.monotonic() - self.started, 3)
        self.state.write("completed")
        return results | {"status": "completed"}

    @cached_property
    def _chosen(self) -> tuple[Tokenizer, Path]:
        return TokenizerChoice(self.options.vocab_file, self.options.hf_tokenizer).resolve(self.backoff)

    # ---- stages

    def _load(self) -> Source:
        options, state = self.options, self.state
        stamps = Stamps(state.stamps)
        loader = Loader(self.backoff, options.download_workers, options.batch_size, stamps)
        request = asdict(options.request) | {"data_files": list(options.request.data_files)}
        try:
            source = loader.load(options.request)
        except UserError as error:
            if not state.hub_files or state.request != request or not isinstance(error.__cause__, ConnectionError):
                raise
            logger.warning(f"the Hub does not answer; going on with the files of the earlier run ({error.__cause__})")
            source = loader.again(options.request, state.hub_files)
        state.request, state.hub_files = request, list(source.description.get("hub_files", []))
        state.stamps = {name: list(stamp) for name, stamp in stamps.seen.items()}
        rows = "" if source.documents is None else f"{source.documents} rows, "
        logger.info(f"loaded: {rows}{source.nbytes / 1e6:.1f} MB")
        return source

    def _detect(self, source: Source) -> Layout:
        options = self.options
        layout = detect(
            source.columns,
            source.sample,
            join_columns=options.join_columns,
            text_column=options.text_column,
            midtrain=options.midtrain_chat_messages,
            skip_template=options.skip_chat_template,
        )
        made_of = {"text": "texts", "messages": "chats", "join": "columns joined by a blank line"}[layout.kind]
        how = {"midtrain": ", flattened to what is said", "plain": ", written out as text"}.get(layout.flatten, "")
        logger.info(f"{', '.join(layout.columns)}: {made_of}{how}")
        is_messages = layout.kind == "messages"
        self.state.results |= {"text_column": ",".join(layout.columns), "is_messages": is_messages}
        if layout.columns == ("text",) and not options.text_column and "messages" in source.columns:
            logger.info("there is a column messages too: --text-column messages takes the chats")
        if not is_messages and options.skip_chat_template:
            logger.info("--skip-chat-template has no effect on texts")
        return layout

    def _count(self, source: Source, layout: Layout) -> None:
        encoding = self._encoding(layout)
        key = content_key("count", source.key, asdict(layout), encoding.describe(), self.options.skip_bad_lines)
        found = self.state.done("count", key)
        if found is not None:
            logger.info(f"[3/5] COUNT done already: {found['token_count']} tokens")
        else:
            logger.info("[3/5] COUNT")
            self._prove(encoding, source, layout)
            counts = count(self._renderer(source, layout), encoding.encoder(append_eod=False), self.options.num_proc)
            name_faults(counts)
            added = encoding.added() * counts.documents  # no part of the texts
            found = {
                "num_documents": counts.documents,
                "token_count": counts.tokens - added,
                "trained_tokens": counts.trained - added,
            }
            if not self.options.count_only:
                found = self.state.finish("count", key, **found)
        found = {name: value for name, value in found.items() if name != "key"}
        self.state.results |= found
        self.state.results["tokens_per_doc"] = round(found["token_count"] / found["num_documents"], 2)

    def _export(self, source: Source, layout: Layout) -> str:
        key = content_key("export", source.key, asdict(layout), self.options.skip_bad_lines)
        path = self.export_path
        found = self.state.done("export", key)
        if found is not None and _unchanged(path, found):
            logger.info(f"[4/5] EXPORT done already: {path}")
        else:
            logger.info(f"[4/5] EXPORT {path}")
            counts, digest = export(self._renderer(source, layout), path, self.options.num_proc)
            if self.options.skip_count:  # else they are named already
                name_faults(counts)
            stat = path.stat()
            found = self.state.finish(
                "export",
                key,
                sha256=digest,
                size=stat.st_size,
                changed=stat.st_mtime_ns,
                num_documents=counts.documents,
                empty_documents=counts.empty,
                bad_records=counts.bad,
            )
        self.state.results |= {n: found[n] for n in ("num_documents", "empty_documents", "bad_records")}
        self.state.results["jsonl_path"] = str(path)
        return found["sha256"]

    def _tokenize(self, digest: str, source: Source, layout: Layout) -> None:
        encoding = self._encoding(layout)
        key = content_key("tokenize", digest, encoding.describe())
        found = self.state.done("tokenize", key)
        if found is not None and all(_sound(prefix) for prefix in found["prefixes"]):
            logger.info("[5/5] TOKENIZE done already")
        else:
            logger.info(f"[5/5] TOKENIZE {self.prefix}")
            self._prove(encoding, source, layout)
            result = tokenise_files(
                [self.export_path],
                encoding.encoder(append_eod=True),
                self.prefix,
                JobOptions(workers=self.options.tokenize_workers),
                settings=encoding.describe(),
                skip_bad=self.options.skip_bad_lines,
                source=source.description,
            )
            write_metadata(self.prefix, asdict(self.options.request), result)
            first = next(iter(result.datasets.values()))
            found = self.state.finish(
                "tokenize",
                key,
                prefixes=list(result.datasets),
                documents=first.documents,
                tokens=first.tokens,
                seconds=round(result.seconds, 3),
            )
        data, *labels = found["prefixes"]
        self.state.results["vocab_file"] = self.options.vocab_file or str(self._chosen[1])
        results = {"tokenized": True, "tokenize_time": found["seconds"], "tokens_written": found["tokens"]}
        results["documents_written"] = found["documents"]
        results |= {"data_path": data, "bin_path": f"{data}.bin", "idx_path": f"{data}.idx"}
        if labels:
            results |= {"label_data_path": labels[0], "label_bin_path": f"{labels[0]}.bin"}
        self.state.results |= results

    # ---- what stages share

    def _renderer(self, source: Source, layout: Layout) -> Renderer:
        return Renderer(source, layout, self.options.skip_bad_lines)

    def _encoding(self, layout: Layout) -> TextEncoding | ChatEncoding:
        tokenizer, folder = self._chosen
        if layout.key == "text":
            return TextEncoding(tokenizer)
        return ChatEncoding.of(tokenizer, folder, self.options.chat_template, self.options.skip_bad_lines)

    def _prove(self, encoding: TextEncoding | ChatEncoding, source: Source, layout: Layout) -> None:
        """Once a run, and only when there is something to tokenise."""
        if not self.proven:
            encoding.prove(_first_lines(source, layout))
            self.proven = True


def _first_lines(source: Source, layout: Layout) -> RenderedChunk:
    """What the first records become in the export."""
    lines: list[Record] = []
    for record in source.sample:
        with suppress(Unusable):
            if (line := layout.render(record)) is not None:
                lines.append(Record("", line))
    return RenderedChunk(lines, 0)


def _unchanged(path: Path, found: dict[str, Any]) -> bool:
    """Whether a file is what was written; its content is read when its size and time say less."""
    if not path.is_file() or path.stat().st_size != found["size"]:
        return False
    return path.stat().st_mtime_ns == found["changed"] or sha256_file(path) == found["sha256"]


def _sound(prefix: str) -> bool:
    """Whether a dataset is complete and agrees with its manifest."""
    try:
        return len(IndexedDataset(prefix)) > 0 and verify(prefix) is not None
    except UserError:
        return False
