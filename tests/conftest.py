"""For all tests: hypothesis must not take a busy machine for a slow function; one PostgreSQL."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.postgres import Postgres

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# A shell without job control starts what it puts in the background deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for those who ask for it; a test that stops it starts it again."""
    with Postgres() as server:
        yield server
