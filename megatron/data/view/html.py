"""A page that shows rows of tokens: one file, nothing loaded from elsewhere, no script."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

import numpy as np

from megatron.data.tokens.partial import WriteError
from megatron.data.view.content import View
from megatron.data.view.decode import token_texts
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer

# Tokens are <b> (trained) and <i> (not), the shortest tags: a page of 100 samples of 4096 tokens has 400,000.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2126; --faint: #68707a; --line: #d5d9de;
  --trained: #0a5c2b; --trained-back: #d9f2df; --bar: #3b76c4; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #dfe3e8; --faint: #949da8; --line: #3a4149;
  --trained: #a5ebb9; --trained-back: #143c22; --bar: #6ea3e8; --card: #1d2126; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; } h3 { font-size: 1rem; }
section { border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; padding: .7rem 1rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
dl { color: var(--faint); display: grid; font-size: .85rem; grid-template-columns: max-content auto; gap: 0 1rem;
  margin: .2rem 0 .6rem; } dd { margin: 0; overflow-wrap: anywhere; }
.part { border-top: 2px solid var(--line); color: var(--faint); font-size: .8rem; margin-top: .7rem;
  overflow-wrap: anywhere; padding-top: .1rem; }
pre { background: var(--card); border-radius: 4px; font: 13px/1.6 ui-monospace, monospace; margin: .2rem 0;
  overflow-wrap: anywhere; padding: .5rem .7rem; white-space: pre-wrap; }
b, i { font-style: normal; font-weight: normal; unicode-bidi: isolate; }
b { background: var(--trained-back); color: var(--trained); }
b:hover, i:hover { outline: 1px solid var(--bar); }
figure { display: inline-block; margin: .5rem 1.5rem .5rem 0; } figcaption { font-size: .85rem; }
svg { height: 150px; width: 420px; max-width: 100%; } rect { fill: var(--bar); } line { stroke: var(--faint); }
svg text { fill: var(--faint); font-size: 12px; }
ul { display: flex; flex-wrap: wrap; gap: .2rem 1.6rem; list-style: none; padding: 0; }
a { color: var(--bar); text-decoration: none; } h2 a { color: inherit; } section:target { border-color: var(--bar); }
"""

_WIDTH, _HEIGHT, _LEFT, _BASE, _TALL, _MOST_BINS = 420, 150, 46, 126, 112, 24  # of a histogram, in pixels


def write_page(path: str | Path, pieces: Iterable[str]) -> None:
    """Write a page; the file appears complete or not at all.

    Raises `UserError` where nothing can be written, `WriteError` when the disk is full.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            for piece in pieces:
                file.write(piece)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise WriteError(f"cannot write {path}: {error.strerror or error}.") from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def page(
    title: str,
    facts: Sequence[tuple[str, str]],
    views: Sequence[View],
    tokenizer: Tokenizer,
    limit: int | None = None,
) -> Iterator[str]:
    """The page, piece by piece: facts, a legend, statistics, links to the rows, then every row (`#row-1`, ...).

    `limit`: tokens shown of a part; the statistics count all.
    """
    yield (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{_text(title)}</h1>\n"
    )
    yield _facts(facts)
    yield (
        "<ul><li><b>trained</b>: the model learns to write it</li>\n<li><i>not trained</i>: it is only read</li>\n"
        "<li>a line: a document begins</li>\n<li>hover over a token: its place, id, position</li></ul>\n"
    )
    yield _statistics(views)
    if len(views) > 1:
        links = (f'<li><a href="#row-{i}">{_text(view.title)}</a></li>' for i, view in enumerate(views, start=1))
        yield "<nav><ul>" + "\n".join(links) + "</ul></nav>\n"
    for i, view in enumerate(views, start=1):
        yield from _section(view, f"row-{i}", tokenizer, limit)
    yield "</body></html>\n"


def _statistics(views: Sequence[View]) -> str:
    cells = ["source", "rows", "tokens", "trained", "padding", "documents", "mean length"]
    rows = []
    for source in dict.fromkeys(view.source for view in views):
        rows.append(_row(source, [view for view in views if view.source == source]))
    if len(rows) > 1:
        rows.append(_row("all", views))
    head = "".join(f"<th{' class=n' if i else ''}>{cell}</th>" for i, cell in enumerate(cells))
    charts = [histogram(_lengths(views), "tokens of a document within a row")]
    if any(len(view.tokens) > view.real for view in views):
        shares = [100 * (1 - view.real / max(len(view.tokens), 1)) for view in views]
        charts.append(histogram(shares, "padding of a row", " %"))
    if any(view.marked for view in views):
        trained = [100 * float(view.trained.sum()) / max(view.real, 1) for view in views]
        charts.append(histogram(trained, "trained tokens of a row", " %"))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>\n<div>{''.join(charts)}</div>\n"


def histogram(values: Sequence[float], title: str, unit: str = "") -> str:
    """A title and an `<svg>` of how often values occur: bars with their range and count on hover, and both axes."""
    low, high = min(values, default=0), max(values, default=0)
    counts, edges = _bin(values, low, high)
    most, step = max(counts), (_WIDTH - _LEFT) / len(counts)
    bars = []
    for i, count in enumerate(counts):
        tall = round(_TALL * count / most, 1) if most else 0
        span = f"{edges[i]:,.4g} to {edges[i + 1]:,.4g}{unit}"
        bars.append(
            f'<rect x="{_LEFT + i * step:.1f}" y="{_BASE - tall:.1f}" width="{max(step - 1, 1):.1f}" '
            f'height="{tall:.1f}">'
            f"<title>{escape(span)}: {count:,}</title></rect>"
        )
    label = f"{title}: {len(values):,} values, {low:,.4g} to {high:,.4g}{unit}"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(bars)}'
        f'<line x1="{_LEFT}" y1="{_BASE}" x2="{_WIDTH}" y2="{_BASE}"/>'
        f'<line x1="{_LEFT}" y1="{_BASE - _TALL}" x2="{_LEFT}" y2="{_BASE}"/>'
        f"{''.join(_marks(low, high, unit, most))}</svg></figure>"
    )


def _marks(low: float, high: float, unit: str, most: int) -> Iterator[str]:
    """The numbers at the axes: counts on the left, values below."""
    for count in dict.fromkeys((0, most // 2, most)):
        y = _BASE - (_TALL * count / most if most else 0)
        yield f'<line x1="{_LEFT - 4}" y1="{y:.1f}" x2="{_LEFT}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{count:,}</text>'
    places = [(float(_LEFT), low, "start")] if high <= low else []
    places = places or [
        (_LEFT + (_WIDTH - _LEFT) * part / 2, low + (high - low) * part / 2, anchor)
        for part, anchor in enumerate(("start", "middle", "end"))
    ]
    for x, value, anchor in places:
        yield f'<text x="{x:.1f}" y="{_BASE + 18}" text-anchor="{anchor}">{value:,.4g}{escape(unit)}</text>'


def _bin(values: Sequence[float], low: float, high: float) -> tuple[list[int], list[float]]:
    """Counts and edges of bins: one per whole number where there are few."""
    if high <= low:
        return [len(values)], [low, high]
    whole = all(float(value).is_integer() for value in values)
    bins = min(_MOST_BINS, int(high - low) + 1) if whole else _MOST_BINS
    counts, edges = np.histogram(np.asarray(values, dtype=np.float64), bins=bins)
    return counts.tolist(), edges.tolist()


def _row(name: str, views: Sequence[View]) -> str:
    lengths = _lengths(views)
    total = sum(len(view.tokens) for view in views)
    real, trained = sum(view.real for view in views), sum(int(view.trained.sum()) for view in views)
    values = [
        f"{len(views):,}",
        f"{real:,}",
        f"{100 * trained / max(real, 1):.1f} %",
        f"{100 * (total - real) / max(total, 1):.1f} %",
        f"{len(lengths):,}",
        f"{np.mean(lengths) if lengths else 0:,.1f}",
    ]
    return f"<tr><td>{_text(name)}</td>{''.join(f'<td class=n>{value}</td>' for value in values)}</tr>"


def _lengths(views: Sequence[View]) -> list[int]:
    return [part.end - part.start for view in views for part in view.parts if not part.padding]


def _section(view: View, anchor: str, tokenizer: Tokenizer, limit: int | None) -> Iterator[str]:
    yield f'<section id="{anchor}"><h2><a href="#{anchor}">{_text(view.title)}</a></h2>{_facts(view.facts)}'
    for part in view.parts:
        yield f'<div class="part">{_text(part.title)}</div>'
        if part.padding:
            continue
        end = part.end if limit is None else min(part.end, part.start + limit)
        yield f"<pre>{''.join(_tokens(view, part.start, end, tokenizer))}</pre>"
        if end < part.end:
            yield f'<div class="part">... {part.end - end:,} more tokens</div>'
    yield "</section>\n"


def _tokens(view: View, start: int, end: int, tokenizer: Tokenizer) -> Iterator[str]:
    yield "\n"  # browsers drop the first line break within <pre>
    texts = token_texts(tokenizer, view.tokens[start:end])
    for at, text in zip(range(start, end), texts, strict=True):
        tag = "b" if view.trained[at] else "i"
        hover = f"{at}: id {int(view.tokens[at])}"
        if view.positions is not None and at < len(view.positions):
            hover += f", position {int(view.positions[at])}"
        if view.doc_ids is not None and at < len(view.doc_ids):
            hover += f", document {int(view.doc_ids[at])}"
        yield f'<{tag} title="{hover}">{_text(text)}</{tag}>'


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{_text(value)}</dd>' for name, value in facts)}</dl>\n"


def _text(text: str) -> str:
    """Escape a text; control characters, which HTML forbids, become their pictures (from U+2400)."""
    out = escape(text)
    if out.isprintable():
        return out
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in out)
