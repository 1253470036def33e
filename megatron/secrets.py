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
    parts: str
    """One of these, in small letters, is in every text that the pattern finds: most lines of a log have none."""
    pattern: re.Pattern[str]
    """Its group `secret` is the part that nobody may see; without one it is all of it. It never reaches over a line,
    and every repetition that may fail after a long match has a bound: these run on each line of a log."""
    is_prose: bool = False
    """It matches words too, which in a comment are an explanation."""


_HUB = "set HF_TOKEN, or run `hf auth login`"
_WANDB = "set WANDB_API_KEY, or run `wandb login`"
_COMET = "set COMET_API_KEY, or write it into ~/.comet.config"
_AWS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"
_GIT = "use git's credential helper or an ssh key"
_OTHER = "set an environment variable that its program reads, or log in with that program"

# What follows the name of a key, up to the first letter of its value: `: `, `=`, `": "`.
_IS = r"""["']?[ \t]{0,20}[:=][ \t]{0,20}["']?"""
# Letters and digits without a break, as no name of a data set, a model or a run has them.
_MIXED = r"(?=[A-Za-z0-9]{0,99}[0-9])(?=[A-Za-z0-9]{0,99}[a-z])(?=[A-Za-z0-9]{0,99}[A-Z])"
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_RANDOM = (
    r"(?<![A-Za-z0-9])(?:(?=[A-Za-z0-9]{0,99}[0-9])(?=[A-Za-z0-9]{0,99}[A-Za-z])[A-Za-z0-9]{16}"
    rf"|{_MIXED}[A-Za-z0-9]{{12}}|{_UUID})"
)
_VALUE = rf"(?P<secret>(?=[A-Za-z0-9+/_=.-]{{0,99}}?{_RANDOM})[A-Za-z0-9+_=-][A-Za-z0-9+/_=.-]{{15,}})"
# Behind the name of a key that cannot be anything else: neither a word nor a number.
_ANY_VALUE = (
    r"(?P<secret>(?=[A-Za-z0-9+/_=.-]{0,99}[0-9])(?=[A-Za-z0-9+/_=.-]{0,99}[A-Za-z])"
    r"[A-Za-z0-9+_=-][A-Za-z0-9+/_=.-]{15,})"
)
_PASSWORD = rf"(?i:(?<![A-Za-z0-9])(?:password|passwd|passphrase)){_IS}"
_FIRST, _MORE = r"""[^\s"'#,}$<(\[{*]""", r"""[^\s"',}]"""

_SHAPES = (
    _Shape("a Hugging Face token", _HUB, "hf_|api_org_", re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b")),
    _Shape("a W&B key", _WANDB, "wandb_v", re.compile(r"\bwandb_v\d_\w{20,}")),
    _Shape(
        "a W&B key",
        _WANDB,
        "wandb",
        re.compile(
            r"(?i:\bwandb[ _.-]?(?:login|api[_-]?key|key|token|host|team|entity|project))"
            rf"(?:{_IS})?(?:[ \t]{{1,20}}|[ \t]{{0,20}}--\S{{1,40}}[ \t]{{1,20}})?(?P<secret>[0-9a-f]{{40}}|\w{{86}})\b"
        ),
    ),
    _Shape("a Comet key", _COMET, "comet", re.compile(rf"(?i:\bcomet[_.-](?:api[_-]?)?key){_IS}{_ANY_VALUE}")),
    _Shape("an AWS key", _AWS, "akia|asia", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    _Shape("an AWS key", _AWS, "aws", re.compile(rf"(?i:\baws[_.-]secret\w{{0,40}}){_IS}{_ANY_VALUE}")),
    _Shape(
        "a GitHub token",
        _GIT,
        "ghp_|gho_|ghu_|ghs_|ghr_|github_pat_",
        re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,})"),
    ),
    _Shape("a GitLab token", _GIT, "glpat-", re.compile(r"\bglpat-[\w-]{20,}")),
    _Shape(
        "an API key",
        _OTHER,
        "sk-|xox|aiza",
        re.compile(
            rf"sk-(?<![\w/.-]sk-)(?=[\w-]{{0,40}}?(?<![A-Za-z0-9])(?:{_MIXED}[A-Za-z0-9]{{16}}|[0-9a-f]{{32}}|{_UUID}))"
            r"[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
        ),
    ),
    _Shape("a private key", "keep it in ~/.ssh", "private key", re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")),
    _Shape(
        "a password in an address",
        "leave it out of the address: a login file (~/.netrc) or the program's own variables hold it",
        "://",
        re.compile(r"://[^\s/:@\"']*:(?P<secret>[^\s/@\"'{$]+)@(?!sha256:)"),
    ),
    _Shape(
        "a signed address",
        "leave the signature out of the address",
        "signature=|sig=|token=|apikey=|api_key=|password=",
        re.compile(
            r"(?i:[?&](?:x-amz-signature|sig|signature|access_token|token|api_?key|password)=)(?P<secret>[^&\s\"']{8,})"
        ),
    ),
    _Shape(
        "a password",
        _OTHER,
        "passw|passphrase",
        re.compile(rf"{_PASSWORD}(?P<secret>(?={_MORE}{{0,99}}[0-9])(?={_MORE}{{0,99}}[A-Za-z]){_FIRST}{_MORE}{{5,}})"),
    ),
    _Shape(
        "a password",
        _OTHER,
        "passw|passphrase",
        re.compile(rf"{_PASSWORD}(?P<secret>(?={_MORE}{{0,99}}[^\s\"',}}\d.]){_FIRST}{_MORE}{{7,}})"),
        is_prose=True,
    ),
    _Shape(
        "a token or key",
        _OTHER,
        "token|secret|key",
        re.compile(
            r"(?i:(?<![A-Za-z0-9])(?:token|secret|api[_-]?key|access[_-]?key(?:[_-]?id)?|secret[_-]?key))"
            rf"{_IS}{_VALUE}"
        ),
    ),
)

# Words of the name of a variable or key, and words after them that make it a fact about a secret. A word such as
# TOKENIZERS or PKEY is another one; PASSWORD and its like are in no other word.
_SECRET_WORDS = re.compile(
    r"(?:^|_)(?:API|AUTH|ACCESS|SECRET|PRIVATE)?(?:KEYS?|TOKEN|NETRC|COOKIES?)(?![A-Z0-9])"
    r"|PASSWORD|PASSWD|PASSPHRASE|SSHPASS|_PWD$|CREDENTIAL|(?:^|_)SECRETS?(?![A-Z0-9])"
)
_ABOUT = r"(?:FILE|PATH|DIR|TYPE|LEN|LENGTH|SIZE|COUNT|LIMIT|PADDING|MASK|DISPATCHER)"
_NO_SECRET = re.compile(
    rf"(?:TOKEN|KEY)_(?:\w+_)?{_ABOUT}$|(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|EOD|EOT|PER|PUBLIC)_(?:TOKEN|KEY)(?:_ID)?$"
)
_FLAG = re.compile(r"(?i)\d{1,3}|true|false|yes|no|on|off")
_COMMENT = re.compile(r"(?:^|\s)#")


def find_secrets(text: str) -> Iterator[Secret]:
    """The secrets of a text, by shape or by the name in front of them, at most one a line."""
    found: dict[int, _Shape] = {}
    for shape in _possible(text):
        line, place = 1, 0
        for match in shape.pattern.finditer(text):
            line, place = line + text.count("\n", place, match.start()), match.start()
            if not (shape.is_prose and _is_in_comment(text, place)):
                found.setdefault(line, shape)
    for line, shape in sorted(found.items()):
        yield Secret(line, shape.kind, shape.instead)


def _possible(text: str) -> list[_Shape]:
    small = text.lower()
    return [shape for shape in _SHAPES if any(part in small for part in shape.parts.split("|"))]


def _is_in_comment(text: str, place: int) -> bool:
    before = text[max(0, place - 1000) : place].rpartition("\n")[2]
    return "#" in before and _COMMENT.search(before) is not None


def hide_secrets(text: str) -> str:
    """`text` with `***` in the place of every secret, for messages that quote what others said."""
    for shape in _possible(text):
        text = shape.pattern.sub(_mask, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether what a variable or a key of this name holds is a secret: WANDB_API_KEY, hf_token, accessToken; not
    TOKENIZERS_PARALLELISM, UCX_IB_PKEY, eos_token or HF_TOKEN_PATH."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[.-]", "_", name).upper()
    return _SECRET_WORDS.search(words) is not None and _NO_SECRET.search(words) is None


def is_secret_variable(name: str, value: str = "") -> bool:
    """Whether an environment variable is a secret, by its name or by what it holds."""
    named = is_secret_name(name) and _FLAG.fullmatch(value) is None  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
    return named or next(find_secrets(f"{name}={value}"), None) is not None


def _mask(match: re.Match[str]) -> str:
    if "secret" not in match.re.groupindex:
        return "***"
    start, end = match.start("secret") - match.start(), match.end("secret") - match.start()
    return f"{match[0][:start]}***{match[0][end:]}"
