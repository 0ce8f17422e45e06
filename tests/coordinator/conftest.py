"""Journals over both databases, and runs that end at no time."""

import pytest

from stratagem.coordinator import rows
from tests.store.conftest import journal_place

__all__ = ["journal_place", "timeless"]


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run ended is the wall clock's, which the simulation does not have."""
    original = rows.view
    monkeypatch.setattr(
        rows, "view", lambda text: original(text).model_copy(update={"ended_at_s": 0.0})
    )
