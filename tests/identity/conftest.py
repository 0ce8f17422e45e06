"""One development authority for all tests of this folder."""

from pathlib import Path

import pytest

from stratagem.common.identity.certificates import Authority, make_authority
from stratagem.common.identity.tls import Role, of_pool


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Has signed for a coordinator on loopback, workers w0, w1 and *.gpu, and the client alice."""
    made = make_authority(tmp_path_factory.mktemp("authority") / "certs")
    made.issue(Role.COORDINATOR, "coordinator", ["localhost", "127.0.0.1", "::1"])
    for name in ("w0", "w1", of_pool("gpu")):
        made.issue(Role.WORKER, name)
    made.issue(Role.CLIENT, "alice")
    return made


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, which signs for the same names."""
    made = make_authority(tmp_path_factory.mktemp("stranger") / "certs")
    made.issue(Role.COORDINATOR, "coordinator", ["localhost", "127.0.0.1", "::1"])
    made.issue(Role.WORKER, "w0")
    made.issue(Role.CLIENT, "alice")
    return made


@pytest.fixture
def own_authority(tmp_path: Path) -> Authority:
    """An authority whose files a test may change."""
    made = make_authority(tmp_path / "certs")
    made.issue(Role.COORDINATOR, "coordinator", ["127.0.0.1"])
    made.issue(Role.WORKER, "w0")
    made.issue(Role.CLIENT, "alice")
    return made
