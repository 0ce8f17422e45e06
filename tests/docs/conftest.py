"""The site, built once for all tests of one process."""

from pathlib import Path

import pytest

from docs.build_site import build
from tests.browser import browser

__all__ = ["browser", "site"]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="needs the extra dev")
    folder = tmp_path_factory.mktemp("built") / "site"
    assert build(folder) == 0
    return folder
