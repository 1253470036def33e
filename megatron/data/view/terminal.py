"""Rows of tokens as lines for a terminal, or for a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.data.view.content import Part, View
from megatron.data.view.decode import token_texts, trained_spans
from megatron.tokenizer import Tokenizer

_GREEN, _CYAN, _BOLD, _DIM, _OFF = "\x1b[32m", "\x1b[36m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
# They would change the order of the text around them.
_TURNS = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}


@dataclass(frozen=True)
class Style:
    """How rows are shown.

    Attributes:
        color: trained parts are green; without, they are between `[[` and `]]`.
        ids: a line per token: index, id, whether it is trained, position and document number, text.
        limit: tokens shown of a part; None: all.
    """

    color: bool = False
    ids: bool = False
    limit: int | None = None


def escape_controls(text: str) -> str:
    """The text with characters escaped that move the cursor, set colours or change the direction of lines."""
    return "".join(_escape(char) for char in text) if not text.isprintable() or _TURNS & set(text) else text


def _escape(char: str) -> str:
    if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160 or char in _TURNS):
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def lines(view: View, tokenizer: Tokenizer | None, style: Style) -> Iterator[str]:
    """The lines of a row; without a tokenizer, only ids."""
    yield _paint(escape_controls(f"== {view.title}"), _BOLD, style)
    width = max((len(name) for name, _ in view.facts), default=0)
    for name, value in view.facts:
        yield _paint(f"   {name:{width}}  {escape_controls(value)}", _DIM, style)
    for part in view.parts:
        yield _paint(escape_controls(f"-- {part.title}"), _CYAN, style)
        if not part.padding:
            yield from _part(view, part, tokenizer, style)


def _part(view: View, part: Part, tokenizer: Tokenizer | None, style: Style) -> Iterator[str]:
    end = part.end if style.limit is None else min(part.end, part.start + style.limit)
    if style.ids:
        yield from _table(view, part.start, end, tokenizer, style)
    elif tokenizer is None:
        yield " ".join(str(token) for token in view.tokens[part.start : end].tolist())
    else:
        yield _text(view, part.start, end, tokenizer, style)
    if end < part.end:
        yield _paint(f"   ... {part.end - end:,} more tokens (--max-tokens shows more)", _DIM, style)


def _text(view: View, start: int, end: int, tokenizer: Tokenizer, style: Style) -> str:
    labels = view.trained[start:end].astype(int) - 1
    marked, out = view.marked, []
    for text, trained in trained_spans(tokenizer, view.tokens[start:end], labels):
        shown = escape_controls(text)
        if trained and style.color:
            # Colours end with each line, or pagers lose them.
            shown = "\n".join(_paint(line, _GREEN, style) if line else "" for line in shown.split("\n"))
        elif trained and marked:
            shown = f"[[{shown}]]"
        out.append(shown)
    return "".join(out)


def _table(view: View, start: int, end: int, tokenizer: Tokenizer | None, style: Style) -> Iterator[str]:
    texts = token_texts(tokenizer, view.tokens[start:end]) if tokenizer is not None else [""] * (end - start)
    inputs = len(view.tokens) - 1
    head = f"   {'at':>6} {'id':>7} trained"
    head += f" {'position':>8}" if view.positions is not None else ""
    head += f" {'document':>8}" if view.doc_ids is not None else ""
    yield _paint(f"{head}  text", _DIM, style)
    for at, text in zip(range(start, end), texts, strict=True):
        line = f"   {at:>6} {int(view.tokens[at]):>7} {'yes' if view.trained[at] else '-':>7}"
        for values in (view.positions, view.doc_ids):
            if values is not None:  # the last token is a target only
                line += f" {int(values[at]) if at < inputs else '-':>8}"
        shown = repr(text)[1:-1]
        yield f"{line}  {_paint(shown, _GREEN, style) if view.trained[at] else shown}"


def _paint(text: str, color: str, style: Style) -> str:
    return f"{color}{text}{_OFF}" if style.color else text
