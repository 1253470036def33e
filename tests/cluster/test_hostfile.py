"""Hostfiles (known fault 70) and resource filters."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cluster.hostfile import find_hostfile, parse_hostfile, select
from megatron.errors import UserError

pytestmark = pytest.mark.cpu

HOSTS = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3], "me@worker-2": [0, 1]}


def write(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_bytes(text.encode())
    return path


def test_reads_hosts_in_order_with_comments_blanks_crlf_and_users(tmp_path: Path) -> None:
    path = write(tmp_path, "h2 slots=8 \r\n\r\n# c\r\nuser@h3   slots=2  # fast\n\nh1 slots=1")
    assert parse_hostfile(path) == {"h2": list(range(8)), "user@h3": [0, 1], "h1": [0]}
    assert list(parse_hostfile(path)) == ["h2", "user@h3", "h1"]


@pytest.mark.parametrize(
    ("text", "number", "shown"),
    [
        ("h1 slots=8\nh2 lots=8\n", 2, "h2 lots=8"),
        ("h1\n", 1, "h1"),
        ("\nh1 slots=x\n", 2, "h1 slots=x"),
        ("h1 slots=0\n", 1, "h1 slots=0"),
        ("h1 slots=2 h2 slots=2\n", 1, "h1 slots=2 h2"),
        ("h1 slots=1\n# x\nh1 slots=2\n", 3, "already on line 1"),
    ],
)
def test_a_bad_line_is_named_with_number_and_text(tmp_path: Path, text: str, number: int, shown: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        parse_hostfile(path)
    assert f"{path}:{number}:" in str(error.value) and shown in str(error.value)


def test_a_hostfile_without_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no host"):
        parse_hostfile(write(tmp_path, "# nothing\n"))


def test_a_named_hostfile_that_is_absent_is_fatal(tmp_path: Path) -> None:
    default = str(tmp_path / "default")
    assert find_hostfile(None, {}, default) is None
    with pytest.raises(UserError, match="hostfile=/nowhere/h"):
        find_hostfile("/nowhere/h", {}, default)
    with pytest.raises(UserError, match="DLTS_HOSTFILE=/nowhere/h"):
        find_hostfile(None, {"DLTS_HOSTFILE": "/nowhere/h"}, default)


def test_hostfile_precedence_is_key_then_environment_then_default(tmp_path: Path) -> None:
    key, env, default = (tmp_path / name for name in ("key", "env", "default"))
    for path in (key, env, default):
        path.touch()
    assert find_hostfile(str(key), {"DLTS_HOSTFILE": str(env)}, str(default)) == key
    assert find_hostfile(None, {"DLTS_HOSTFILE": str(env)}, str(default)) == env
    assert find_hostfile(None, {}, str(default)) == default


def test_include_picks_hosts_and_slots_and_keeps_the_rank_order() -> None:
    assert select(HOSTS, include="worker-1:0,2@worker-0") == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}
    assert list(select(HOSTS, include="worker-1:0,2@worker-0")) == ["worker-0", "worker-1"]
    assert select(HOSTS, include="me@worker-2:1@worker-1") == {"worker-1": [0, 1, 2, 3], "me@worker-2": [1]}


def test_exclude_drops_hosts_and_slots() -> None:
    assert select(HOSTS, exclude="worker-1@me@worker-2:0") == {"worker-0": [0, 1, 2, 3], "me@worker-2": [1]}
    assert select(HOSTS, exclude="me@worker-2:0,1") == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


def test_num_nodes_and_num_gpus_cap_what_the_filters_left() -> None:
    assert select(HOSTS, exclude="worker-0", num_nodes=1) == {"worker-1": [0, 1, 2, 3]}
    assert select(HOSTS, num_nodes=2, num_gpus=2) == {"worker-0": [0, 1], "worker-1": [0, 1]}
    assert select(HOSTS, include="worker-1:2,3", num_gpus=1) == {"worker-1": [2, 3]}  # as GPT-NeoX: the filter wins


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "both"),
        ({"include": "worker-9"}, "Did you mean 'worker-"),
        ({"include": "worker-0:7"}, "worker-0 has no slot 7, only 0, 1, 2, 3 "),
        ({"include": "worker-0:a"}, "numbers"),
        ({"include": "worker-0@worker-0"}, "twice"),
        ({"exclude": "worker-0@worker-1@me@worker-2"}, "no host"),
        ({"num_nodes": 4}, "only 3 hosts"),
        ({"num_gpus": 3}, "me@worker-2 has 2 slots"),
    ],
)
def test_bad_filters_are_refused(filters: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        select(HOSTS, **filters)
