"""The fake coordinator, served for a test."""

from collections.abc import Iterator

import pytest

from stratagem.client.sdk.blocking import Client
from tests.client.fake_coordinator import FakeCoordinator, served
from tests.patience import PATIENCE_S


@pytest.fixture
def fake() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def address(fake: FakeCoordinator) -> Iterator[str]:
    with served(fake) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, patience_s=PATIENCE_S) as client:
        yield client
