"""The real SLURM of the tests: started once per session, when the first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.real.keeper import Keeper
from tests.cluster.real.slurm_cluster import Accounting, Cluster, Munge, SshHeads, find_obstacle


@pytest.hookimpl(tryfirst=True)  # before `-m` decides
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("cluster")


@dataclass(frozen=True)
class Servers:
    """What the clusters of a session share."""

    folder: Path
    keeper: Keeper
    munge: Munge
    accounting: Accounting
    clusters: list[Cluster] = field(default_factory=list)


@dataclass(frozen=True)
class TwoClusters:
    """Two clusters behind ssh. `ssh -F ssh_config ALIAS` reaches `head-first`, `head-second`; `head-down` is dead."""

    first: Cluster
    second: Cluster
    ssh_config: Path


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    obstacle = find_obstacle()
    if obstacle is not None:
        if os.environ.get("DEEPY_REQUIRE_CLUSTER") == "1":
            pytest.fail(f"DEEPY_REQUIRE_CLUSTER=1, but {obstacle}")
        pytest.skip(obstacle)
    folder = tmp_path_factory.mktemp("slurm")
    with Keeper() as keeper:
        munge = Munge(keeper, folder / "munge")
        yield Servers(folder, keeper, munge, Accounting(keeper, folder / "accounting", munge))


def _cluster(servers: Servers, name: str, nodes: list[str]) -> Cluster:
    cluster = Cluster(name, nodes, servers.folder / name, servers.keeper, servers.munge, servers.accounting)
    servers.clusters.append(cluster)
    return cluster


@pytest.fixture(scope="session")
def slurm(_servers: Servers) -> Cluster:
    """Four nodes with four GPUs each, accounting, partitions main, low and high (which preempts low by requeue)."""
    return _cluster(_servers, "first", ["a1", "a2", "a3", "a4"])


@pytest.fixture(scope="session")
def two_clusters(_servers: Servers, slurm: Cluster) -> TwoClusters:
    """`slurm`, a second cluster with two nodes, and an ssh head for each."""
    second = _cluster(_servers, "second", ["b1", "b2"])
    heads = {"head-first": slurm, "head-second": second, "head-down": None}
    return TwoClusters(slurm, second, SshHeads(_servers.keeper, _servers.folder / "ssh", heads).config)


@pytest.fixture(scope="module", autouse=True)
def _idle_afterwards(_servers: Servers) -> Iterator[None]:
    """No job of one module is left for the next, and no node down."""
    yield
    for cluster in _servers.clusters:
        cluster.cancel_all()
