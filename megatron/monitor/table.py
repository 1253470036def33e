"""The table of runs and jobs: as wide as the terminal, and plain text where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron.monitor.judge import minutes
from megatron.monitor.rows import Row

_PIPE_WIDTH = 4000  # columns of a pipe: nothing is cut off or folded there
_PROBLEM_WIDTH = 130  # columns of a terminal from which on problems have a column of their own
_STYLES = {"training": "green", "done": "green", "evaluation": "cyan", "checkpoint": "cyan", "failed": "red"}
_STYLES |= {"pending": "yellow", "starting": "yellow", "stopped": "yellow"}
_BAR = 8


@dataclass(frozen=True)
class Column:
    """`width`: columns of the terminal from which on it is shown; `limit`: its own columns at most, 0 for any."""

    title: str
    text: Callable[[Row], str]
    width: int = 0
    limit: int = 0
    right: bool = False


def _iteration(row: Row) -> str:
    if row.iteration is None:
        return ""
    if not row.train_iters:
        return str(row.iteration)
    share = min(row.iteration / row.train_iters, 1.0)
    done = int(share * _BAR)
    return f"{row.iteration}/{row.train_iters} {'#' * done}{'.' * (_BAR - done)} {share:.0%}"


def _name(row: Row) -> str:
    return row.experiment or row.job_name or ""


def _scores(row: Row) -> str:
    shown = [f"{name.removesuffix('/lm_loss')} {score.value:.4g}" for name, score in row.scores.items() if _tells(name)]
    running = [f"evaluating {', '.join(map(str, row.evaluating))}"] if row.evaluating else []
    return ", ".join([*running, *shown[-3:]])


def _tells(name: str) -> bool:
    return not name.endswith(("_ppl", "_stderr", "_macro"))


def _problem(row: Row) -> str:
    if not row.problems:
        return row.action_reason if row.state == "pending" else ""
    action = f"{row.action}: " if row.action else ""
    rest = "; ".join(one.text for one in row.problems if one.text not in row.action_reason)
    return f"{action}{row.action_reason}" + (f"; {rest}" if rest else "")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _job(row: Row) -> str:
    again = f" +{row.restarts}" if row.restarts else ""
    return f"{row.job_id or '-'}{again}"


COLUMNS = (
    Column("job", _job),
    Column("state", lambda row: row.state),
    Column("experiment", _name, limit=36),
    Column("iteration", _iteration),
    Column("loss", lambda row: _number(row.loss, ".4f"), right=True),
    Column("tokens/s", lambda row: _number(row.tokens_per_second, ",.0f"), 120, right=True),
    Column("MFU", lambda row: _number(row.mfu, ".1%"), 120, right=True),
    Column("ETA", lambda row: "" if row.eta_seconds is None else minutes(row.eta_seconds), 100, right=True),
    Column("seen", lambda row: "" if row.heartbeat_age is None else minutes(row.heartbeat_age), 100, right=True),
    Column("scores", _scores, 150, limit=40),
    Column("problem", _problem, _PROBLEM_WIDTH),
)


def make_console() -> Console:
    """Stdout as a terminal."""
    return Console(highlight=False)


def make_table(rows: Sequence[Row], width: int, plain: bool) -> RenderableType:
    """The rows in as many columns as `width` has room for; all of them when `plain`.

    In a narrow terminal problems follow the table, since a narrow column cannot be read.
    """
    table = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False)
    columns = [one for one in COLUMNS if plain or width >= one.width]
    room = max(8, width - 54 - 11 * (len(columns) - 5))  # next to those of the narrowest table and further ones
    for one in columns:
        folded = one.title == "problem" and not plain
        table.add_column(
            one.title,
            justify="right" if one.right else "left",
            ratio=1 if folded else None,
            max_width=None if plain or not one.limit else min(one.limit, room),
            no_wrap=not folded,
            overflow="fold" if folded else "ellipsis",
        )
    for row in rows:
        style = _STYLES.get(row.state, "")
        cells = [Text(" ".join(one.text(row).split()), style=style if one.title == "state" else "") for one in columns]
        table.add_row(*cells)
    if plain or width >= _PROBLEM_WIDTH:
        return table
    below = [Text(f"{_job(row)} {_name(row)[:40]}: {text}") for row in rows if (text := _problem(row))]
    return Group(table, *below)


class Runs(list[Row]):
    """Rows that print as the table: text in a terminal, HTML in Jupyter."""

    def __repr__(self) -> str:
        return "\n".join(plain_lines(make_table(self, 0, plain=True)))

    def _repr_html_(self) -> str:
        used = [one for one in COLUMNS if any(one.text(row) for row in self)]
        lines = [[one.title for one in used], *([one.text(row) for one in used] for row in self)]
        cells = ["".join(f"<td>{escape(text)}</td>" for text in line) for line in lines]
        head = cells[0].replace("td>", "th>")
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in cells[1:])}</table>"


def plain_lines(table: RenderableType) -> list[str]:
    """A table as lines without padding at their ends."""
    console = Console(width=_PIPE_WIDTH, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
