"""Messages for people: logging of rank 0 on stderr, messages logged once, progress of long work.

Messages go to stderr, results to stdout.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from megatron.errors import as_shown
from megatron.secrets import hide_secrets

T = TypeVar("T")

# What a log keeps and a person who watches a terminal need not see: between INFO and DEBUG.
DETAIL = 15
# Begins what a bar draws, behind tqdm's own: no change on a terminal, but two of them are known in a rank's output.
BAR_MARK = "\r"
# The variable in which our launcher names the file that it writes the messages of rank 0 to.
RANK_LOG = "DEEPY_RANK_LOG"
_ROOT = "deepy"
_RESULTS = "deepy.results"
_UNKNOWN = "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}{postfix}]"  # of a bar without an end


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it as `get_logger(__name__)`."""
    return logging.getLogger(f"{_ROOT}.{name.removeprefix('megatron.')}")


def on_terminal() -> bool:
    """Whether a person watches: both results and messages go to a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


@contextmanager
def _beside_bars(stream: TextIO | None) -> Iterator[TextIO | None]:
    """Where to write lines meant for `stream`, so that they stand above the bars that are on the terminal: those are
    drawn again below them. Our launcher passes stderr on, so that stdout would overtake it."""
    bars = sys.modules.get("tqdm.std")
    if bars is None or not on_terminal() or not getattr(bars.tqdm, "_instances", None):
        yield stream
        return
    with bars.tqdm.external_write_mode(file=sys.stderr):
        yield sys.stderr


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with _beside_bars(self.stream):
            super().emit(record)


class _Formatter(logging.Formatter):
    """Hides secrets: a message may quote what a server, a command or a traceback said."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_secrets(super().format(record))


class _File(logging.FileHandler):
    """A log file: once it cannot be written (a full disk) the run goes on without it."""

    def _open(self) -> TextIO:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        logging.getLogger(_ROOT).removeHandler(self)


def configure(rank: int = 0, level: str = "INFO", file: Path | None = None, *, beside: bool = False) -> None:
    """Set up logging for this process: rank 0 logs from `level` up (with INFO from DETAIL up where there is no
    terminal), the others from WARNING up with their rank.

    `file` takes the messages and results of every rank, with the time; `beside`: those that do not go to stderr, which
    somebody else writes into it. Calling it again replaces the earlier set-up.
    """
    root, wanted = logging.getLogger(_ROOT), getattr(logging, level.upper(), logging.INFO)
    for old in root.handlers:
        old.close()
    root.handlers.clear()
    root.propagate = False
    handler = _Handler(sys.stderr)
    handler.setFormatter(_Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    if wanted == logging.INFO and not on_terminal():
        wanted = DETAIL
    handler.setLevel(wanted if rank == 0 else logging.WARNING)
    # A result is on stdout already.
    handler.addFilter(lambda record: record.name != _RESULTS)
    root.addHandler(handler)
    if file is not None:
        if not beside:  # the first to know when it cannot be
            file.parent.mkdir(parents=True, exist_ok=True)
        into = _File(file, encoding="utf-8", delay=True)
        into.setFormatter(_Formatter("%(message)s" if beside else "%(asctime)s %(message)s"))
        if beside:
            into.addFilter(lambda record: not getattr(record, "on_stderr", record.levelno >= handler.level))
        root.addHandler(into)
    root.setLevel(min(wanted, logging.DEBUG if file is not None else wanted) if rank == 0 or file else logging.WARNING)


@contextmanager
def only_errors() -> Iterator[None]:
    """Log only errors meanwhile: for checks whose warnings are logged again later."""
    root = logging.getLogger(_ROOT)
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)


class Once:
    """Logs each message a single time: `once = Once(logger); once.info("...")`."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._logged: set[str] = set()

    def info(self, message: str) -> None:
        self._log(logging.INFO, message)

    def warning(self, message: str) -> None:
        self._log(logging.WARNING, message)

    def _log(self, level: int, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            self.logger.log(level, message)


class ProgressBar:
    """Shows how far long work is: a bar on a terminal, plain lines with percentages elsewhere.

    Args:
        what: what is being done, the start of every line.
        total: the count when all is done; None: unknown.
        unit: of the count; "B" counts bytes.
        before: the count at the start, where an earlier run stopped; it is part of the share, not of the rates.
        rates: a text about the work after so many seconds, instead of count and speed; also logged at the end.
        ends: the last line is logged, however short the work is.
        style: of the bar, in tqdm's words (`bar_format`).
    """

    LINE_SECONDS, BAR_SECONDS = 5.0, 0.1  # between two lines, between two redraws of a bar

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "it",
        *,
        before: float = 0,
        rates: Callable[[float], str] | None = None,
        ends: bool = False,
        style: str | None = None,
    ) -> None:
        self._what, self._total, self._unit, self._before, self._rates = what, total, unit, before, rates
        self._logger, self._bar, self._done = get_logger("progress"), None, before
        if sys.stderr.isatty():
            from tqdm.std import tqdm

            # `leave`: a bar below another one goes when it is done.
            shown: dict[str, Any] = {"unit_scale": unit == "B", "dynamic_ncols": True, "leave": None}
            shown["bar_format"] = BAR_MARK + (style or ("{l_bar}{bar}{r_bar}" if total else _UNKNOWN))
            self._bar = tqdm(total=total, desc=what, unit=unit, initial=before, **shown)
        self._start = self._shown = time.monotonic()
        self._ends, self._logged = ends, before - 1

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.close()
        elif failure is None and self._ends and self._logged != self._done:
            self._log()
        if failure is None and self._rates is not None:
            self._logger.info(f"{self._what}: done in {clock(self._seconds())}, {self._rates(self._seconds())}")

    def __call__(self, more: float) -> None:
        """Count `more` as done."""
        self.reach(self._done + more)

    def reach(self, done: float) -> bool:
        """Set the count, the same one to show new rates; whether it was shown, which needs some time since it was
        last."""
        self._done, now = done, time.monotonic()
        if now - self._shown < (self.LINE_SECONDS if self._bar is None else self.BAR_SECONDS):
            return False
        self._shown = now
        if self._bar is not None:
            self._draw(self._bar)
        else:
            self._log()
        return True

    def _log(self) -> None:
        self._logged = self._done
        self._logger.info(f"{self._what}: {self._share()}{self._text()}")

    def _draw(self, bar: Any) -> None:
        if self._rates is not None:
            bar.set_postfix_str(self._rates(self._seconds()), refresh=False)
        bar.n = self._done
        bar.refresh()

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _share(self) -> str:
        if not self._total or not self._done:
            return ""
        left = self._seconds() * max(self._total - self._done, 0) / max(self._done - self._before, 1e-9)
        share = min(self._done / self._total, 1)
        return f"{share:.0%}|{'#' * int(10 * share):10}| ETA {clock(left)}, "  # as in tqdm's bars: people grep for %|

    def _text(self) -> str:
        if self._rates is not None:
            return self._rates(self._seconds())
        speed = (self._done - self._before) / self._seconds()
        if self._unit == "B":
            return f"{self._done / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s"
        return f"{self._done} {self._unit}, {speed:.1f} {self._unit}/s"


def clock(seconds: float) -> str:
    """`3725` -> `1:02:05`, `65` -> `1:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress(items: Iterable[T], *, what: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate, showing how many items are done; `total` is their number where `items` has no length."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    with ProgressBar(what, total, unit) as bar:
        for item in items:
            yield item
            bar(1)


def part_of_result(text: str) -> None:
    """Print the next part of a result on stdout, at once; `result(..., show=False)` of all of it comes at its end."""
    print(text, end="", flush=True)


def result(line: str, *, show: bool = True) -> None:
    """Print one line of a command's result (a training or evaluation line, a table) on stdout, at once; without `show`
    it goes into the log file alone."""
    on_stderr = False
    if show:
        with _beside_bars(sys.stdout) as stream:
            print(f"{line}\n", end="", flush=True, file=stream)  # in one piece: ranks are unbuffered
            on_stderr = stream is sys.stderr
    logging.getLogger(_RESULTS).info(line, extra={"on_stderr": on_stderr})


def note_failure(error: BaseException) -> None:
    """Keep why this process ends in its log file; `run_cli` shows it on stderr."""
    shown = as_shown(error)
    text = "ended by an error:" if shown is None else f"{type(shown).__name__}: {shown}"
    logging.getLogger(_RESULTS).error(text, exc_info=error if shown is None else None)
