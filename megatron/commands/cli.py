"""The console command `deepy`: finds the sub-command, loads it alone, hands it the rest of the line.

Until then nothing but click is imported: `deepy --help`, a typo and the completion of a shell answer at once.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from megatron import signals
from megatron.commands.table import COMMANDS, Command, Group, rows
from megatron.errors import UserError, nearest, run_cli
from megatron.home import HOME, version

_EPILOG = """\b
A first training, on any machine:
  deepy data corpus stdlib -d data       tokenise this Python's own library
  deepy plan tiny.yml                    check and plan: what would run where
  deepy train tiny.yml save=runs/tiny    train; the same command again resumes
  deepy generate tiny.yml text_generation.yml load=runs/tiny

\b
Configs are looked for in the folder of the call, then among those that come with
Deepy (llama/7B.yml, pythia/70M.yml, ...). Relative paths inside a config start in the
folder of the call; ${CONFIG_DIR} in a config is that of the config itself.

\b
Tab completes commands, flags and keys after this line in ~/.bashrc (or zsh, fish):
  eval "$(_DEEPY_COMPLETE=bash_source deepy)"

\b
Exit codes: 0 done, 2 the input is wrong, 3 stopped on request, 4 the numbers went bad,
5 a rank was lost, 6 the machine gave out, 1 anything else."""


def main() -> None:
    """The console command; exits with the code of the table in megatron/errors.py."""
    first = COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    is_run = isinstance(first, Command) and first.is_run
    if is_run:
        signals.ExitAtStop()  # one may come during the imports
    run_cli(lambda: run(sys.argv[1:]), is_run=is_run)


def run(argv: Sequence[str]) -> int | None:
    """Run a command line without `deepy` itself; returns the exit code. Raises `UserError`."""
    try:
        return group().main(list(argv) or ["--help"], "deepy", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except click.ClickException as error:
        raise UserError(error.format_message()) from error


def group() -> click.Group:
    """All sub-commands; none of their modules is loaded."""
    top = _Group("deepy", _commands(COMMANDS, ()), help="Train language models.", epilog=_EPILOG)
    top.context_settings["help_option_names"] = ["-h", "--help"]
    return click.version_option(version(), prog_name="deepy", message="%(prog)s %(version)s")(top)


def _commands(table: Mapping[str, Command | Group], path: tuple[str, ...]) -> dict[str, click.Command]:
    return {
        name: _Forwarded((*path, name), row)
        if isinstance(row, Command)
        else _Group(name, _commands(row.commands, (*path, name)), help=f"{row.help}: {', '.join(row.commands)}")
        for name, row in table.items()
    }


class _Group(click.Group):
    """A group in which `-` and `_` are the same, and a misspelt name is answered with the nearest."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        wanted, names = args[0].replace("_", "-"), list(self.commands)
        if wanted not in self.commands and not wanted.startswith("-") and not ctx.resilient_parsing:
            raise UserError(
                f"{ctx.command_path}: {args[0]!r} is no command; there are {', '.join(names)}.{nearest(wanted, names)}"
            )
        return super().resolve_command(ctx, [wanted, *args[1:]])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as in the table, not by the alphabet


class _Forwarded(click.Command):
    """A sub-command whose arguments, `--help` too, are for its own parser."""

    def __init__(self, path: tuple[str, ...], row: Command) -> None:
        rest = click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete_file)
        settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
        super().__init__(
            path[-1],
            settings,
            callback=lambda rest: _call(path, row, rest),
            params=[rest],
            short_help=row.help,
            add_help_option=False,
        )
        self.row = row

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The long flags of its parser; of what starts runs, the keys of a config, too."""
        flags = list(_load(self.row, "parser")().long_flags())
        if self.row.is_run:
            from megatron.neox_arguments.groups import all_keys

            flags += [f"--{key.replace('_', '-')}" for key in all_keys()]
        wanted = incomplete.replace("_", "-")
        return [CompletionItem(flag) for flag in dict.fromkeys(flags) if flag.startswith(wanted)]


def _complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files here; of what starts runs also the configs that come with Deepy."""
    here = Path(incomplete)
    if not ctx.command.row.is_run or any(here.parent.glob(f"{here.name}*")):
        return [CompletionItem(incomplete, type="file")]
    shipped = (path.relative_to(HOME / "configs").as_posix() for path in (HOME / "configs").rglob("*.yml"))
    return [CompletionItem(name) for name in sorted(shipped) if name.startswith(incomplete)]


def _call(path: Sequence[str], row: Command, rest: Sequence[str]) -> int | None:
    """Run the function of a row as if its script had been started with these arguments."""
    name = " ".join(("deepy", *path))
    sys.argv = [name, *row.before, *rest]  # argparse and messages take the program's name from here
    with _as_typed() if {"-h", "--help"} & {*rest} else contextlib.nullcontext():
        return _load(row, "main")([*row.before, *rest])


def _load(row: Command, name: str) -> Callable[..., Any]:
    """A function of a row's script or module, which is loaded now."""
    if not row.where.endswith(".py"):
        return getattr(import_module(row.where), name)
    spec = spec_from_file_location(f"deepy_{Path(row.where).stem}", HOME / row.where)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@contextlib.contextmanager
def _as_typed() -> Iterator[None]:
    """What is printed inside names commands as the user types them: `deepy verify` for `python tools/.../verify.py`."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        print(as_deepy(text.getvalue()), end="")


def as_deepy(text: str) -> str:
    """`text` with the sub-commands in place of the scripts that they are."""
    for path, row in sorted(rows(COMMANDS), key=lambda one: -len(one[1].before)):
        script, *flags = (f"deepy.py {row.before[0]}", *row.before[1:]) if row.before else (row.where,)
        flag = "".join(f"(.*) {re.escape(one)}" for one in flags)
        text = re.sub(
            rf"python {re.escape(script)}\b{flag}", r"deepy {}{}".format(" ".join(path), r"\1" * len(flags)), text
        )
    return text


if __name__ == "__main__":
    main()
