"""Where the tests of this folder keep blobs and journals, and one S3 server for all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from tests.coordinator.store.journals import OVER_BOTH
from tests.coordinator.store.places import (
    BUCKET,
    Bucket,
    Folder,
    LeafBucket,
    LeafFolder,
    Place,
    environ_of,
)
from tests.worker.pipeline.s3_server import s3_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture
def bucket(tmp_path: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    environ = environ_of(s3_endpoint)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return Bucket(tmp_path, environ)


@pytest.fixture
def memory(tmp_path: Path) -> Bucket:
    """For what no server is needed."""
    return Bucket(tmp_path, {}, MemoryStore())


@pytest.fixture
def leaf_bucket(bucket: Bucket) -> LeafBucket:
    return LeafBucket(bucket.root, bucket.environ)


def of_server(name: str) -> Any:
    """An S3 server takes 10 ms for a request: what it must do of all this, test_s3 tries."""
    return pytest.param(name, marks=pytest.mark.sweep)


@pytest.fixture(
    params=["folder", "leaves", "memory", of_server("bucket"), of_server("leaf_bucket")]
)
def blob_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Folder(tmp_path)
    if request.param == "leaves":
        return LeafFolder(tmp_path)
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["folder", "memory", of_server("bucket")])
def spool_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where states lie in leaves, updates lie as they do without."""
    if request.param == "folder":
        return Folder(tmp_path)
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=OVER_BOTH)
def place(request: pytest.FixtureRequest, journal_place: Callable[[str], str]) -> str:
    """Over PostgreSQL in the sweep, but for the contract of journals (test_journal.py)."""
    return journal_place(request.param)
