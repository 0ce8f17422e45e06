"""Journals over both databases, and runs that end at no time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stratagem.coordinator.store import fact_log
from tests.postgres import Postgres


@pytest.fixture
def journal_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Where a new journal may be opened, over "sqlite" or "postgres"."""

    def place(database: str) -> str:
        if database == "sqlite":
            return str(tmp_path / "journal.db")
        server: Postgres = request.getfixturevalue("postgres")
        return server.new_schema()

    return place


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run ended is the wall clock's, which the simulation does not have."""
    original = fact_log.view_of
    monkeypatch.setattr(
        fact_log, "view_of", lambda text: original(text).model_copy(update={"ended_at_s": 0.0})
    )
