"""Journals over both databases, and runs that end at no time."""

import pytest

from stratagem.coordinator.store.journal import fact_codec
from tests.coordinator.store.conftest import journal_place

__all__ = ["journal_place", "timeless"]


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a run ended is the wall clock's, which the simulation does not have."""
    original = fact_codec.view
    monkeypatch.setattr(
        fact_codec, "view", lambda text: original(text).model_copy(update={"ended_at_s": 0.0})
    )
