"""Errors that reach the user, and the one table of exit codes.

| code | class           | meaning                                                                   |
|------|-----------------|---------------------------------------------------------------------------|
| 0    | -               | done                                                                      |
| 1    | any other error | a bug: the traceback is shown                                   |
| 2    | `UserError`     | the input is wrong: one message naming file, line or key and the fix      |
| 3    | `StopRequested` | stopped on request with everything saved: start me again                  |
| 4    | `NumericsError` | the numbers went bad: do not restart blindly                              |
| 5    | `LostRankError` | a rank hangs or is lost                                                   |
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches


class DeepyError(Exception):
    """Base of the errors whose message is written for the user; carries the exit code."""

    exit_code = 1


class UserError(DeepyError):
    """The user's input is wrong. The message names where (file, line or key) and how to fix it."""

    exit_code = 2


class StopRequested(DeepyError):
    """The run stops because it was asked to (signal, time limit), after saving."""

    exit_code = 3


class NumericsError(DeepyError):
    """Loss or gradients are no longer finite and the policy is to stop."""

    exit_code = 4


class LostRankError(DeepyError):
    """A rank of the job hangs or died."""

    exit_code = 5


def nearest(name: str, choices: list[str]) -> str:
    """A ` Did you mean ...?` sentence for a misspelt name, or an empty string."""
    close = get_close_matches(name, choices, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a command-line `main` and exit with the code of the table above.

    A `DeepyError` is shown as one message on stderr; anything else keeps its traceback.
    """
    try:
        code = main() or 0
    except DeepyError as error:
        print(f"{type(error).__name__}: {error}" if error.exit_code != 2 else f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    sys.exit(code)
