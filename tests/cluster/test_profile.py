"""Cluster profiles: reading, inheritance, detection, and what is said about a wrong file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cluster.profile import (
    ClusterProfile,
    expand,
    find_profile,
    list_profiles,
    load_profile,
    sbatch_flags,
)
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A site's own profiles in two folders, and a home without any."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "home").mkdir()
    return {"DEEPY_CLUSTERS": str(tmp_path / "mine"), "HOME": str(tmp_path / "home")}


def written(env: dict[str, str], text: str, name: str = "site") -> Path:
    path = Path(env["DEEPY_CLUSTERS"]) / f"{name}.yml"
    path.write_text(text)
    return path


def refused(env: dict[str, str], text: str) -> str:
    written(env, text)
    with pytest.raises(UserError) as caught:
        load_profile("site", env)
    return str(caught.value)


def test_the_shipped_profiles_are_read(env: dict[str, str]) -> None:
    by_name = {profile.name: profile for profile in list_profiles(env)}
    assert list(by_name) == ["isambard-slingshot", "generic", "infiniband", "local"]  # by priority, then name
    slingshot = by_name["isambard-slingshot"]
    assert slingshot.nccl == "system" and slingshot.nodes["pretrain"] == 64 and slingshot.gpus_per_node == 4
    assert slingshot.environment["NCCL_NET"] == "AWS Libfabric" and slingshot.environment["NCCL_CROSS_NIC"] == "1"
    for profile in by_name.values():  # a host that waits for each collective operation, and torch that watches none
        assert not [name for name in profile.environment if "BLOCKING_WAIT" in name or "ASYNC_ERROR" in name]
    assert slingshot.modules.purge and slingshot.modules.load[1] == "cuda/12.6"
    assert slingshot.preflight.plugin == "AWS Libfabric" and slingshot.preflight.bandwidth_gb_s == 20.0
    assert slingshot.time == "24:00:00" and slingshot.priority < by_name["infiniband"].priority == 900


def test_a_profile_inherits_and_changes(env: dict[str, str]) -> None:
    path = written(
        env,
        "extends: isambard-slingshot\nnccl: wheel\naccount: mine\npartition: null\n"
        "environment: {NCCL_CROSS_NIC: 0, FI_PROVIDER: null, TOKENIZERS_PARALLELISM: 'false'}\n"
        "folders: {logs: ~/logs}\n",
    )
    profile = load_profile("site", env)
    assert (profile.name, profile.path, profile.nccl, profile.account) == ("site", path, "wheel", "mine")
    assert profile.partition is None and profile.gpus_per_node == 4
    assert profile.environment["NCCL_CROSS_NIC"] == "0" and "FI_PROVIDER" not in profile.environment
    assert profile.environment["TOKENIZERS_PARALLELISM"] == "false"  # no secret
    assert profile.environment["NCCL_NET"] == "AWS Libfabric"
    assert profile.folder("logs", env) == f"{env['HOME']}/logs" and profile.folder("repo", {"HOME": "/h"}) == "/h/deepy"
    assert profile.detect.file == ()  # it is another cluster
    assert load_profile(str(path), {"HOME": env["HOME"]}) == profile  # by its file


def test_a_site_changes_a_shipped_profile_under_its_name(env: dict[str, str]) -> None:
    written(env, "extends: generic\npartition: gpu\n", "generic")
    assert load_profile("generic", env).partition == "gpu" and load_profile("generic", env).provider == "slurm"
    user = Path(env["HOME"]) / ".config/deepy/clusters"
    user.mkdir(parents=True)
    (user / "generic.yml").write_text("extends: generic\nqos: long\npartition: other\n")
    both = load_profile("generic", env)  # DEEPY_CLUSTERS, then ~/.config, then the shipped ones
    assert (both.partition, both.qos, both.provider) == ("gpu", "long", "slurm")
    written(env, "extends: there\n", "here")
    written(env, "extends: here\n", "there")
    with pytest.raises(UserError, match=r"here\.yml: .*itself"):
        load_profile("here", env)


def test_detection(env: dict[str, str], tmp_path: Path) -> None:
    assert find_profile(env, hostname="laptop").name == "local"
    assert find_profile(env | {"SLURM_JOB_ID": "7"}, hostname="n1").name == "generic"
    written(env, "priority: 5\ndetect: {hostname: ['gpu*'], partition: 'a100*', file: []}\n")
    written(env, f"detect: {{file: ['{tmp_path}/mine']}}\n", "always")
    assert find_profile(env, hostname="gpu07.site.org").name == "site"
    assert find_profile(env, hostname="cpu07.gpu.org").name == "always"
    assert find_profile(env | {"SLURM_JOB_PARTITION": "a100-long", "SLURM_JOB_ID": "7"}, hostname="n1").name == "site"
    assert find_profile(env | {"SLURMD_NODENAME": "gpu1"}, hostname="one").name == "site"
    assert find_profile(env | {"DEEPY_CLUSTER": "infiniband"}, hostname="gpu1").name == "infiniband"
    assert find_profile(env | {"DEEPY_CLUSTER": "infiniband"}, "local", hostname="gpu1").name == "local"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ssh: head\npartion: gpu\n", ("site.yml:2:", "partion", "'partition'")),
        ("modules:\n  purge: true\n  lod: [cuda]\n", ("site.yml:3:", "lod", "'load'")),
        ("folders: {log: /logs}\n", ("site.yml:1:", "log", "'logs'", "tokenizers")),
        ("time: 24:00:00\n", ("site.yml:1:", "time", "86400", "quotes")),
        ("\nmax_nodes: many\n", ("site.yml:2:", "max_nodes", "'many'")),
        ("nodes: {debug: 0}\n", ("site.yml:1:", "nodes.debug", "0")),
        ("environment:\n  A: 1\n  B: yes\n", ("site.yml:3:", "environment.B", "True", "quotes")),
        ("environment: {HF_TOKEN: abc}\n", ("site.yml:1:", "HF_TOKEN", "secret")),
        ("environment: {A-B: abc}\n", ("site.yml:1:", "A-B")),
        ("folders: {logs: '${A:-\"b}'}\n", ("site.yml:1:", "folders.logs", '${A:-"b}')),
        ("environment: {A: '${B-c}'}\n", ("site.yml:1:", "environment.A", "${B-c}")),
        ('submit_command: "\'site_sbatch"\n', ("site.yml:1:", "submit_command")),
        ("remap: {/: /new}\n", ("site.yml:1:", "remap")),
        ("nccl: wheels\n", ("site.yml:1:", "'wheels'", "system, wheel")),
        ("preflight: {nccl: 2.26}\n", ("site.yml:1:", "preflight.nccl", "2.26", "quotes")),
        ("preflight: {nccl: '2.26'}\n", ("site.yml:1:", "preflight.nccl", ">=2.26")),
        ("gpu: A100\ngpu: H100\n", ("site.yml:2:", "site.yml:1")),
        ("extends: infinband\n", ("site.yml:1:", "'infiniband'")),
        ("gpu: [\n", ("site.yml:2:", "YAML")),
    ],
)
def test_what_is_wrong_is_named_with_its_line(env: dict[str, str], text: str, parts: tuple[str, ...]) -> None:
    message = refused(env, text)
    assert all(part in message for part in parts), message


def test_all_that_is_wrong_is_one_message(env: dict[str, str]) -> None:
    message = refused(env, "gpus: 4\nqos: 7\nnodes: {debug: few}\n")
    assert "site.yml:1:" in message and "site.yml:2:" in message and "site.yml:3:" in message


def test_a_profile_that_does_not_exist(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_profile("isambard-slinshot", env)
    assert "'isambard-slingshot'" in str(caught.value) and env["DEEPY_CLUSTERS"] in str(caught.value)
    with pytest.raises(UserError, match=r"DEEPY_CLUSTERS: .*nowhere"):
        list_profiles({"DEEPY_CLUSTERS": str(tmp_path / "nowhere")})


def test_variables() -> None:
    assert expand("${A}/x-${B:-b}/$C", {"A": "/a"}, "f:1") == "/a/x-b/$C"
    with pytest.raises(UserError, match=r"f:1: \$\{A\}/x.* A "):
        expand("${A}/x", {"A": ""}, "f:1")
    profile = ClusterProfile("x", Path("x.yml"), folders={"logs": "${NOWHERE}/l"}, lines={"folders.logs": "x.yml:3"})
    with pytest.raises(UserError, match=r"x\.yml:3: folders\.logs.*NOWHERE"):
        profile.folder("logs", {})
    assert profile.folder("data", {}) is None


def test_flags_for_sbatch() -> None:
    profile = ClusterProfile(
        "x", Path("x.yml"), partition="gpu", time="1:00:00", exclude_nodes=("n1", "n2"), nodes={"debug": 2}
    )
    assert sbatch_flags(profile) == ["--partition=gpu", "--time=1:00:00", "--exclude=n1,n2"]
    assert sbatch_flags(profile, "debug")[-1] == "--nodes=2"
    with pytest.raises(UserError, match="'debug'"):
        sbatch_flags(profile, "debg")
