"""Where the tests of this folder keep blobs and journals, and one S3 server for all of them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
def leaf_bucket(bucket: Bucket) -> LeafBucket:
    return LeafBucket(bucket.root, bucket.environ)


@pytest.fixture(
    params=["folder", "leaves", "bucket", pytest.param("leaf_bucket", marks=pytest.mark.sweep)]
)
def blob_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Leaves in a bucket in the sweep, as they have whole blobs as leaves in a folder do."""
    if request.param == "folder":
        return Folder(tmp_path)
    if request.param == "leaves":
        return LeafFolder(tmp_path)
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["folder", "bucket"])
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
