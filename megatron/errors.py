"""Errors that reach the user, and the one table of exit codes.

| code | class           | meaning                                                                   |
|------|-----------------|---------------------------------------------------------------------------|
| 0    | -               | done                                                                      |
| 1    | any other error | a bug: the traceback is shown                                             |
| 2    | `UserError`     | the input is wrong: one message naming file, line or key and the fix      |
| 3    | `StopRequested` | stopped on request, everything is saved or nothing trained: start again   |
| 4    | `NumericsError` | the numbers went bad: do not restart blindly                              |
| 5    | `LostRankError` | a rank hangs or is lost                                                   |
| 6    | `MachineError`  | the disk is full or failed, a limit is reached: make room, start me again |
| 130  | -               | ended at once, by a second Ctrl-C (a tool: by the first; 143: by SIGTERM)  |
| 128+N| -               | a run without the callback `stop_on_signal`: ended at once by signal N    |
| 141  | -               | a tool whose reader is gone (`| head`); runs continue                     |
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches

from megatron.secrets import hide_secrets
from megatron.streams import keep_writing


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


class MachineError(DeepyError):
    """The machine gave out: disk or quota full, file size or another limit reached, a disk that fails."""

    exit_code = 6


_MACHINE_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE),
    *(errno.EIO, errno.EROFS, errno.ESTALE),
}
INTERRUPTED, READER_GONE = 130, 141


def as_shown(error: BaseException) -> DeepyError | None:
    """The error as users are to see it: itself, a `MachineError`, a `UserError` for a name that no file can have; None
    when it is a bug."""
    if isinstance(error, DeepyError):
        return error
    if isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS:
        return MachineError(str(error))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(f"too long for the name of a file (255 bytes per part): {error.filename}")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return MachineError(f"{error}: the number of processes and threads is limited (ulimit -u)")
    return None


def cannot_write(error: OSError, text: str) -> DeepyError:
    """`text` as a `MachineError` when the machine gave out, else as a `UserError`: the place cannot be written."""
    short = error.errno is None  # how numpy reports that less was written than asked
    return MachineError(text) if short or error.errno in _MACHINE_ERRNOS else UserError(text)


def exit_code_of(error: BaseException) -> int:
    """The code of the table above with which a command ends by `error`."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    shown = as_shown(error)
    return shown.exit_code if shown is not None else 1


def nearest_name(name: str, choices: list[str], cutoff: float = 0.6) -> str | None:
    """The choice that a misspelt name means, or None when none is as near as `cutoff` (1: the same)."""
    return next(iter(get_close_matches(name, choices, n=1, cutoff=cutoff)), None)


def nearest(name: str, choices: list[str]) -> str:
    """A ` Did you mean ...?` sentence for a misspelt name, or an empty string."""
    meant = nearest_name(name, choices)
    return f" Did you mean {meant!r}?" if meant else ""


def run_cli(main: Callable[[], int | None], *, is_run: bool = False) -> None:
    """Run a command-line `main` and exit with the code of the table above.

    A `DeepyError` is shown as one message on stderr; anything else keeps its traceback. A closed stderr ends no
    command, a closed stdout no run (`is_run`): their work does not depend on a reader.

    A run that fails is gone at once: Python's and torch's tear-down would wait for threads, and for collective
    operations in which no other rank takes part any more; nobody would see that the job is over. A run that succeeds
    does what was left for its end (`atexit`) and is gone as well: a thread of a library that is still alive would abort
    the process in the tear-down, and the whole job with it.
    """
    keep_writing("stderr", *(["stdout"] if is_run else []))
    try:
        code = main() or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        if is_run:
            atexit._run_exitfuncs()
        else:
            sys.exit(code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not is_run:  # a run's is a socket that lost its peer
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere, silently
            sys.exit(READER_GONE)
        shown, code = as_shown(error), exit_code_of(error)
        if shown is not None:
            text = f"{type(shown).__name__}: {shown}" if shown.exit_code != 2 else f"error: {shown}"
            print(hide_secrets(text), file=sys.stderr)
        elif is_run:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            raise
    if is_run:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
