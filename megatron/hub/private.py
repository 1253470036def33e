"""What of a run's files others may read: no secrets, no user names, no paths of this machine.

Of a path the last part stays, which is what a data set or a tokenizer is called; keys about the machine and its users
are left out. Addresses (`https://`, `s3://`) stay, without a password in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from megatron.errors import UserError
from megatron.hub.retry import redact
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.yaml_files import parse_value
from megatron.secrets import is_secret_name

REMOVED = "(removed)"
# Besides secrets that are known by themselves (secrets.py): what may be a key of W&B, and addresses of persons.
_NOT_SHARED = re.compile(r"\b([A-Za-z0-9]{86}|[0-9a-f]{40}|[\w.+-]+@[\w-]+(\.[\w-]+)*)\b")
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?")
_COMMIT_NAMES = ("git_hash", "git", "commit", "commit_hash")
# An absolute path, or one below a home folder; not `//` of an address, nor what follows a word or `}`.
_PART = r"""[^\s"'`,:;\[\]{}()<>|/*]"""
_PATH = re.compile(rf"(?:file:/{{0,2}})?(?<![\w.~$}}<])(?<!(?<!:/)/)(?!//\w)(?:~[\w.-]*|/{_PART}+)(?:/{_PART}+)*/?")
_MACHINE = ("s3_path", "s3_load", "wandb_team", "wandb_host", "comet_workspace")
_MACHINE += ("host", "hostname", "user", "username", "email")
_PLUGINS = "plugins"  # of the group `launcher`, which says where a run went


def share_value(value: Any, name: str = "") -> Any:
    """A plain value as others may read it; `name`: its key. Keys about the machine are left out of mappings."""
    if isinstance(value, Mapping):
        return {key: share_value(each, str(key)) for key, each in value.items() if not _is_of_machine(str(key))}
    if isinstance(value, list | tuple):
        return [share_value(each, name) for each in value]
    if not isinstance(value, str):
        return value
    if is_secret_name(name):
        return REMOVED
    known = all_keys().get(name)
    # A relative one may lead through a home folder, too; a bucket is nobody else's affair.
    if known is not None and known.path and ("://" not in value or value.startswith("s3://")):
        return value.rstrip("/").rpartition("/")[2]
    return value if name in _COMMIT_NAMES and _COMMIT.fullmatch(value) else share_text(value)


def share_text(text: str) -> str:
    """A text as others may read it."""
    kept = _LOGIN.sub("***@", _NOT_SHARED.sub(REMOVED, redact(text)))
    return _PATH.sub(lambda path: path[0].rstrip("/").rpartition("/")[2], kept)


def share_yaml(text: str) -> str | None:
    """A config file as others may read it, without its comments; None when it is not YAML with keys."""
    try:
        content = parse_value(text)
    except (yaml.YAMLError, UserError):
        return None
    return dump_yaml(content) if isinstance(content, dict) else None


def dump_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as YAML, as others may read it."""
    return yaml.safe_dump(share_value(config), sort_keys=True, allow_unicode=True)


def _is_of_machine(name: str) -> bool:
    known = all_keys().get(name)
    return name in _MACHINE or (known is not None and known.group == "launcher" and name != _PLUGINS)
