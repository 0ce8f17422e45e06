"""Two worker processes for the tests that leave them alive; a fresh rig for those that do not."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.worker.service.rig import Rig, Worker, open_rig


@pytest.fixture(scope="session")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path_factory.mktemp("rig")) as opened:
        yield opened


@pytest.fixture(scope="session")
async def w0(rig: Rig) -> Worker:
    return await rig.start("w0", "--health-port", "0", "--tags", "a,b")


@pytest.fixture(scope="session")
async def w1(rig: Rig) -> Worker:
    return await rig.start("w1")


@pytest.fixture
async def own_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as opened:
        yield opened
