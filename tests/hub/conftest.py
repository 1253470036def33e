"""A real S3 server for the tests of buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.hub.s3_server import S3Server


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """The server, with one empty bucket `bucket`, and this process as its client."""
    for name, value in {**running.environment, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    running.refuses = running.cuts = lambda method, path: False
    resource = boto3.resource("s3")
    bucket = resource.create_bucket(Bucket="bucket")
    running.log.clear()
    yield running
    running.gate.set()
    running.refuses = running.cuts = lambda method, path: False
    bucket.objects.all().delete()
