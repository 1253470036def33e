"""Tokens, keys and passwords in texts: what they look like, and where they belong instead.

A config is copied into checkpoints, `resolved.yml` and trackers, a command line is seen by everybody on the machine,
and a log is shown around: none of them may hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Secret(NamedTuple):
    """A secret in a text: the number of its line from 1, what it is, and where it belongs."""

    line: int
    kind: str
    instead: str

    def refusal(self, where: str) -> str:
        """A message that refuses it in a config; never shows it."""
        return (
            f"{where}: there is {self.kind} here. Configs are copied into checkpoints, trackers and logs, so it must "
            f"not be in one: remove it and {self.instead}. If others could read it, revoke it."
        )


class _Shape(NamedTuple):
    kind: str
    instead: str
    pattern: re.Pattern[str]
    """Its group `secret` is the part that nobody may see; without one it is all of it."""


_HUB = "set HF_TOKEN, or run `hf auth login`"
_WANDB = "set WANDB_API_KEY, or run `wandb login`"
_COMET = "set COMET_API_KEY, or write it into ~/.comet.config"
_AWS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"
_GIT = "use git's credential helper or an ssh key"
_OTHER = "set an environment variable that its program reads, or log in with that program"

# What follows the name of a key, up to the first letter of its value: `: `, `=`, `": "`.
_IS = r"""["']?\s*[:=]\s*["']?"""
# A value that is neither a word, nor a path, nor a number.
_VALUE = r"(?P<secret>(?=[A-Za-z0-9+/_=.-]*[0-9])(?=[A-Za-z0-9+/_=.-]*[A-Za-z])[A-Za-z0-9+_=-][A-Za-z0-9+/_=.-]{15,})"
_BEGIN = r"(?i:(?<![A-Za-z0-9])(?:\w+[_.-])?"

_SHAPES = (
    _Shape("a Hugging Face token", _HUB, re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b")),
    _Shape("a W&B key", _WANDB, re.compile(r"\bwandb_v\d_\w{20,}")),
    _Shape(
        "a W&B key",
        _WANDB,
        re.compile(
            r"(?i:\bwandb[ _.-]?(?:login|api[_-]?key|key|token|host|team|entity|project))"
            rf"(?:{_IS})?(?:\s+|\s*--\S+\s+)?(?P<secret>[0-9a-f]{{40}}|\w{{86}})\b"
        ),
    ),
    _Shape("a Comet key", _COMET, re.compile(rf"(?i:\bcomet[_.-](?:api[_-]?)?key){_IS}{_VALUE}")),
    _Shape("an AWS key", _AWS, re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    _Shape("an AWS key", _AWS, re.compile(rf"(?i:\baws[_.-]secret\w*){_IS}{_VALUE}")),
    _Shape("a GitHub token", _GIT, re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,})")),
    _Shape("a GitLab token", _GIT, re.compile(r"\bglpat-[\w-]{20,}")),
    _Shape(
        "an API key", _OTHER, re.compile(r"\b(?:sk-(?:[a-z]+-)*[A-Za-z0-9_]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{35})")
    ),
    _Shape("a private key", "keep it in ~/.ssh", re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")),
    _Shape(
        "a password in an address",
        "leave it out of the address: a login file (~/.netrc) or the program's own variables hold it",
        re.compile(r"(?i:\b[a-z][a-z0-9+.-]*://)[^\s/:@\"']*:(?P<secret>[^\s/@\"'{$]+)@"),
    ),
    _Shape(
        "a signed address",
        "leave the signature out of the address",
        re.compile(
            r"(?i:[?&](?:x-amz-signature|sig|signature|access_token|token|api_?key|password)=)(?P<secret>[^&\s\"']{8,})"
        ),
    ),
    _Shape(
        "a password",
        _OTHER,
        re.compile(
            rf"{_BEGIN}(?:password|passwd|passphrase)){_IS}"
            r"(?P<secret>(?!(?:[\d.,]+|null|None|true|false)(?:[\"'\s},]|$))[^\s\"'#,}$<(\[{][^\s\"',}]{3,})"
        ),
    ),
    _Shape(
        "a token or key",
        _OTHER,
        re.compile(rf"{_BEGIN}(?:token|secret|api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key)){_IS}{_VALUE}"),
    ),
)

_NAME_PARTS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "NETRC", "COOKIE")


def find_secrets(text: str) -> Iterator[Secret]:
    """The secrets of a text, by shape or by the name in front of them, line by line."""
    for number, line in enumerate(text.splitlines(), start=1):
        for shape in _SHAPES:
            if shape.pattern.search(line):
                yield Secret(number, shape.kind, shape.instead)
                break


def hide_secrets(text: str) -> str:
    """`text` with `***` in the place of every secret, for messages that quote what others said."""
    for shape in _SHAPES:
        text = shape.pattern.sub(_mask, text)
    return text


def is_secret_variable(name: str, value: str = "") -> bool:
    """Whether an environment variable is a secret, by its name or by what it holds."""
    return any(part in name.upper() for part in _NAME_PARTS) or next(find_secrets(f"{name}={value}"), None) is not None


def _mask(match: re.Match[str]) -> str:
    if "secret" not in match.re.groupindex:
        return "***"
    start, end = match.start("secret") - match.start(), match.end("secret") - match.start()
    return f"{match[0][:start]}***{match[0][end:]}"
