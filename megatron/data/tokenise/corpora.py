"""The corpora that `prepare_data.py` knows by name: the running Python's standard library, and GPT-NeoX's list.

NeoX's own download addresses are mostly dead; the same names come from the Hugging Face Hub here, read as a stream.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.tokenise.chunks import BATCH_ROWS, Chunk, RowChunk
from megatron.errors import UserError
from megatron.tokenizer.hub import require_hub

PILE = "monology/pile-uncopyrighted"


@dataclass(frozen=True)
class HubCorpus:
    """A corpus on the Hugging Face Hub, with its text in the column "text".

    `load`: further arguments of `datasets.load_dataset`; `pile_set`: the component of the Pile to keep; `cut_after`:
    a text is cut into documents that end with this string.
    """

    repo: str
    subset: str | None = None
    load: Mapping[str, str] = field(default_factory=dict)
    pile_set: str | None = None
    cut_after: str | None = None


HUB_CORPORA: dict[str, HubCorpus] = {
    # One text of 100 MB, XML of Wikipedia pages. The repository itself holds a loading script, which `datasets` no
    # longer runs; the Hub's own conversion of it is what can be read.
    "enwik8": HubCorpus("LTCB/enwik8", "enwik8-raw", load={"revision": "refs/convert/parquet"}, cut_after="</page>\n"),
    "pile": HubCorpus(PILE),
    "pile_subset": HubCorpus(PILE, load={"data_files": "train/00.jsonl.zst"}),
    "c4": HubCorpus("allenai/c4", "en"),
    "c4_openwebtext": HubCorpus("allenai/c4", "realnewslike"),
    "openwebtext2": HubCorpus("Geralt-Targaryen/openwebtext2"),
    "enron": HubCorpus(PILE, pile_set="Enron Emails"),
    "github": HubCorpus(PILE, pile_set="Github"),
    "arxiv": HubCorpus(PILE, pile_set="ArXiv"),
    "europarl": HubCorpus(PILE, pile_set="EuroParl"),
    "freelaw": HubCorpus(PILE, pile_set="FreeLaw"),
    "nih": HubCorpus(PILE, pile_set="NIH ExPorter"),
    "pubmed": HubCorpus(PILE, pile_set="PubMed Abstracts"),
    "hackernews": HubCorpus(PILE, pile_set="HackerNews"),
    "stackexchange": HubCorpus(PILE, pile_set="StackExchange"),
    "ubuntu_irc": HubCorpus(PILE, pile_set="Ubuntu IRC"),
}
# Parts of the Pile that were withdrawn for copyright; NeoX's names are kept so that the message says that.
WITHDRAWN = ("books1", "books3", "youtube_subtitles")
NAMES = ("stdlib", *HUB_CORPORA, *WITHDRAWN)

STDLIB_KINDS = (".py", ".txt", ".rst", ".c", ".h")
# Installed packages are not the standard library; its own tests are more than half of it and full of made-up data.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Text and source files of the standard library below `root` (default: the running Python's), in a fixed order.

    The order is by a hash of the path inside `root`, so that the parts of a train/valid/test split are alike.
    Raises `UserError` when there are none.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in STDLIB_SKIPPED]
        paths = (os.path.relpath(os.path.join(folder, name), root) for name in names)
        found += [path for path in paths if path.endswith(STDLIB_KINDS) and os.path.getsize(os.path.join(root, path))]
    if not found:
        raise UserError(
            f"stdlib: no {'/'.join(STDLIB_KINDS)} files below {root}: is this Python installed without them?"
        )
    return [root / path for path in sorted(found, key=lambda path: hashlib.sha256(path.encode()).hexdigest())]


def hub_chunks(name: str) -> Iterator[Chunk]:
    """The documents of the Hub corpus `name`. Raises `UserError` when it is withdrawn or cannot be reached."""
    if name in WITHDRAWN:
        raise UserError(f"{name}: this part of the Pile was withdrawn for copyright and has no public source")
    corpus = HUB_CORPORA[name]
    texts = (part for text in _hub_texts(name, corpus) for part in _cut(text, corpus.cut_after))
    rows = enumerate({"text": text} for text in texts)
    while batch := list(itertools.islice(rows, BATCH_ROWS)):
        part = [row for _, row in batch]
        yield RowChunk(corpus.repo, batch[0][0], part, sum(len(row["text"]) for row in part))


def _hub_texts(name: str, corpus: HubCorpus) -> Iterator[str]:
    try:
        rows = _load(corpus)
    # What `datasets` raises for an unreachable or changed repository is a long and changing list.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{name}: cannot read {corpus.repo} from the Hugging Face Hub ({reason}). Without a network, "
            "`python prepare_data.py stdlib` makes a corpus from files on this machine."
        ) from error
    for row in rows:
        if corpus.pile_set is None or row["meta"]["pile_set_name"] == corpus.pile_set:
            yield row["text"]


def _load(corpus: HubCorpus) -> Iterable[Mapping[str, Any]]:
    if not Path(corpus.repo).exists():  # a local folder needs no network
        require_hub()
    from datasets import load_dataset

    return load_dataset(corpus.repo, corpus.subset, split="train", streaming=True, **corpus.load)


def _cut(text: str, after: str | None) -> Iterator[str]:
    parts = text.split(after) if after else [text]
    yield from (part + after for part in parts[:-1] if after)
    if parts[-1]:
        yield parts[-1]
