"""All that is wrong with the user's input, collected, and shown in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.errors import UserError


class UserErrors(UserError):
    """Several `UserError`s (`parts`) in one message, a line each."""

    def __init__(self, parts: Sequence[UserError]) -> None:
        lines = (str(part).replace("\n", "\n    ") for part in parts)
        super().__init__("\n  ".join([f"{len(parts)} things are wrong:", *lines]))
        self.parts = tuple(parts)


class Problems:
    """Collects `UserError`s to raise them as one. What hands its problems to a collector continues where it can.

    `keys` are configuration keys without a value that can be used: because of a problem of theirs, or because they
    follow from a key that has one. What reads them is not checked, so that nobody is shown the consequences of a
    mistake as more mistakes.
    """

    def __init__(self) -> None:
        self.found: list[UserError] = []
        self.keys: set[str] = set()

    def add(self, problem: UserError | str, *keys: str) -> None:
        """One more problem (or several that were raised as one), and the keys that it makes unusable."""
        self.keys.update(keys)
        for part in problem.parts if isinstance(problem, UserErrors) else [problem]:
            if str(part) not in map(str, self.found):
                self.found.append(part if isinstance(part, UserError) else UserError(part))

    def usable(self, *keys: str) -> bool:
        """Whether nothing was found that is about any of these keys."""
        return self.keys.isdisjoint(keys)

    @contextmanager
    def collect(self, *keys: str) -> Iterator[None]:
        """Add what is raised inside; `keys` are unusable then."""
        try:
            yield
        except UserError as problem:
            self.add(problem, *keys)

    def raise_all(self) -> None:
        """Raise one `UserError` with all that was found; nothing happens when that is nothing."""
        if self.found:
            raise self.found[0] if len(self.found) == 1 else UserErrors(self.found)


@contextmanager
def collector(problems: Problems | None = None) -> Iterator[Problems]:
    """`problems`, which somebody else raises, or one that is raised at the end, with what is raised inside."""
    if problems is not None:
        yield problems
        return
    found = Problems()
    with found.collect():
        yield found
    found.raise_all()
