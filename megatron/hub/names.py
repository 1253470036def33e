"""Names of repositories: `<owner>/<prefix><experiment>` of a model, `<owner>/neox-ckpt-<model>` of its raw checkpoints.

A file of names (YAML or JSON; one that ships is `huggingface/names/sfm.yml`) has up to four keys:

    prefix: lab-                        # before names that are not listed under `names`
    replace: {"=": "-"}                 # characters or texts, in this order
    abbreviate: {synthetic: synth}      # afterwards, in this order
    names: {my_experiment: my-model}    # exact names, used as they are

Without a file the name is the experiment's own. Either is made valid for the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.errors import UserError, nearest

RAW_PREFIX = "neox-ckpt-"
LONGEST, LONGEST_RAW = 96, 70  # of `owner/neox-ckpt-name` and of a name; of the name in the raw repository
_GAP = "___"
FORK_NAMES = "model_hf_codenames"  # the one key of the fork's experiment_hf_mappings.json
FORK_RULES = "sfm"
_KEYS = ("prefix", "replace", "abbreviate", "names")


@dataclass(frozen=True)
class Names:
    """Rules from experiments to names, as in the file; `path`: that file, for messages."""

    prefix: str = ""
    replace: Mapping[str, str] = field(default_factory=dict)
    abbreviate: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    path: str = "the rules for names"

    def model(self, experiment: str) -> str:
        """The model's name without its owner. Raises `UserError` when nothing of it is valid on the Hub."""
        if experiment in self.names:
            return self.names[experiment]
        name = experiment
        for old, new in (*self.replace.items(), *self.abbreviate.items()):
            name = name.replace(old, new)
        return shorten(_valid(self.prefix + name), LONGEST)

    def check(self, experiment: str, others: Iterable[str]) -> None:
        """Raise `UserError` when one of the `others` (experiments) has the model name or raw name of `experiment`."""
        own = self.model(experiment)
        for other in others:
            name = self.model(other) if other != experiment else ""
            if name and (name == own or raw_name(name) == raw_name(own)):
                raise UserError(
                    f"{experiment} and {other} would both be {own if name == own else raw_name(own)} on the Hub; give "
                    f"one of them a name of its own under `names` in {self.path} (--names)"
                )


def raw_name(model: str) -> str:
    """The name of a model in that of its raw repository: at most 70 characters, the middle replaced by `___`."""
    # Runs of separators become one, as in the names that the fork gave: `_` is safe, `--` and `..` are refused.
    return shorten(re.sub(r"[-_.]{2,}", "_", model.strip("-.")), LONGEST_RAW)


def raw_repo(owner: str, model: str) -> str:
    """`owner/neox-ckpt-<model>`. Raises `UserError` when the owner's name leaves no room for one."""
    room = LONGEST - len(f"{owner}/{RAW_PREFIX}")
    if room < 16:
        raise UserError(f"the owner {owner!r} is too long: {LONGEST} characters hold owner/{RAW_PREFIX}name")
    return f"{owner}/{RAW_PREFIX}{shorten(raw_name(model), room)}"


def shorten(name: str, longest: int) -> str:
    """A name of at most `longest` characters: its beginning, `___`, and three characters more of its end."""
    if len(name) <= longest:
        return name
    start = longest // 2 - len(_GAP)
    return f"{name[:start]}{_GAP}{name[-(longest - start - len(_GAP)) :]}"


def _valid(name: str) -> str:
    """What the Hub takes: letters, digits, `-`, `_`, `.`; no `--` or `..`, none of `-.` at the ends."""
    made = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    made = re.sub(r"--+", "-", re.sub(r"\.\.+", ".", made)).strip("-.").removesuffix(".git")
    if not re.search(r"[A-Za-z0-9]", made):
        raise UserError(f"{name!r} has no letter or digit that a name on the Hub could be made of")
    return made


def read_names(given: str | None, folder: Path) -> Names:
    """The rules that `--names` gives: a file, or the name of one in `folder` (`sfm`); None: no rules.

    Raises `UserError` with file and key for a wrong key or value, and for two experiments with one exact name.
    """
    if given is None:
        return Names()
    path = Path(given)
    if not path.is_file():
        known = {found.stem: found for found in sorted(folder.glob("*.yml"))}
        if given not in known:
            raise UserError(f"--names: there is no file {given}, nor one of these: {', '.join(known) or 'none'}")
        path = known[given]
    content = _read(path)
    if FORK_NAMES in content:
        _only(path, content, (FORK_NAMES,))
        return replace(read_names(FORK_RULES, folder), names=_exact(path, content, FORK_NAMES), path=str(path))
    _only(path, content, _KEYS)
    prefix = content.get("prefix") or ""
    if not isinstance(prefix, str):
        raise UserError(f"{path}: prefix: {prefix!r} is no text")
    rules = {key: _texts(path, content, key) for key in ("replace", "abbreviate")}
    return Names(prefix, **rules, names=_exact(path, content, "names"), path=str(path))


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--names: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--names: {path} holds no mapping with the keys {', '.join(_KEYS)}")
    return content


def _only(path: Path, content: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in content:
        if key not in keys:
            raise UserError(f"--names: {path}: unknown key {key!r}.{nearest(str(key), list(keys))}")


def _texts(path: Path, content: Mapping[str, Any], key: str) -> dict[str, str]:
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"--names: {path}: {key} is no mapping of texts")
    for old, new in found.items():
        if not (isinstance(old, str) and old and isinstance(new, str)):
            raise UserError(f"--names: {path}: {key}: {old!r}: {new!r} are no two texts (put them in quotes)")
    return found


def _exact(path: Path, content: Mapping[str, Any], key: str) -> dict[str, str]:
    """Exact names: valid as they are, each of one experiment."""
    found, taken = _texts(path, content, key), dict[str, str]()
    for experiment, name in found.items():
        if _valid(name) != name or len(name) > LONGEST:
            raise UserError(
                f"--names: {path}: {key}: {experiment}: {name!r} is no name on the Hub; {_valid(name)!r} is"
            )
        if name in taken:
            raise UserError(f"--names: {path}: {key}: {taken[name]} and {experiment} have the same name {name!r}")
        taken[name] = experiment
    return found
