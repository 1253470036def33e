"""Numbers and tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def count(value: float) -> str:
    """`1234567` -> `1.23M`; exact below ten thousand."""
    if abs(value) < 10_000:
        return f"{value:g}"
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}" if value / factor < 999.5 else f"{value / factor:.0f}{unit}"
    return f"{value:g}"


def size(value: float) -> str:
    """Bytes in binary units: `1536` -> `1.5 KiB`."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Aligned columns, two spaces apart: text to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    right = [bool(rows) and all(_is_number(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return [line(head), *map(line, cells)]


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:2].lstrip("-")[:1].isdigit() or text == "-"


def shorten(items: Sequence[object], most: int = 12) -> str:
    """`1, 2, 3, ..., 99, 100` for long lists."""
    texts = [str(item) for item in items]
    if len(texts) > most:
        texts = [*texts[: most - 2], "...", *texts[-2:]]
    return ", ".join(texts)
