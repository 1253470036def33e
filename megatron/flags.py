"""The parser of every command line: one spelling of flags, errors that name what was meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron.errors import UserError, nearest

# Names that people type, where a command has a longer one: the first that it has is meant.
_SHORT = {
    "--output": ("--output-dir", "--output-prefix", "--tokenizer-output-path", "--model-path", "--sample-output-file"),
    "--input": ("--input-dir", "--json-input-dir", "--dataset", "--hf-model", "--model", "--sample-input-file"),
}


class Parser(argparse.ArgumentParser):
    """argparse in which `-` and `_` are the same inside the names of flags, `--input` and `--output` are those of the
    command whatever their full names are, text is shown as it is written, and errors are `UserError`s."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        self._unknown: list[str] = []
        self.more_names: list[str] = []  # that an unknown flag may be meant for, besides its own
        super().__init__(*args, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(self._declared, given[:end]), *given[end:]], namespace)

    def _declared(self, item: str) -> str:
        """A long flag as the command declares it; other items as they are."""
        name, equals, value = item.partition("=")
        if not item.startswith("--") or " " in name:
            return item
        found = self.flags_named(name)
        if len({id(self._option_string_actions[flag]) for flag in found}) == 1:
            return found[0] + equals + value
        self._unknown += [] if found else [name]
        return item

    def flags_named(self, name: str) -> list[str]:
        """The long flags that `name` may mean, as they are declared; one that the help leaves out only by its own name:
        a command that does not read `--sample_output_file` has no `--output`."""
        wanted, flags = name.replace("_", "-"), self.long_flags()
        if wanted in flags:
            return [flags[wanted]]
        actions = self._option_string_actions
        shown = {one: flag for one, flag in flags.items() if actions[flag].help != argparse.SUPPRESS}
        found = [shown[one] for one in _SHORT.get(wanted, ()) if one in shown][:1]
        return found or [flag for one, flag in shown.items() if self.allow_abbrev and one.startswith(wanted)]

    def long_flags(self) -> dict[str, str]:
        """The long flags with `-` in their names -> as they are declared."""
        return {one.replace("_", "-"): one for one in self._option_string_actions if one.startswith("--")}

    def error(self, message: str) -> NoReturn:
        """What argparse would say; but of an unknown flag first, which is often why another one is missing."""
        if self._unknown:
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [*(flag for action in shown for flag in action.option_strings), *self.more_names]
            meant = nearest(self._unknown[0], flags)
            message = f"unrecognized arguments: {self._unknown[0]}{meant and f'.{meant}'}"
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help)")
