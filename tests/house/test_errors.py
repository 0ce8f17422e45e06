"""The error catalogue names every error, and sentences that our code really says."""

import re

import pytest

from docs.error_catalogue import AGAIN, CAUSES, ONLY_A_BASE, classes, sentences
from stratagem.common.rpc.status_codes import TABLE

pytestmark = pytest.mark.core

NAMES = {kind.__name__ for kind in classes()} - set(ONLY_A_BASE)


def test_every_error_has_a_place_and_a_status() -> None:
    assert set(CAUSES) == set(AGAIN) == NAMES
    assert {kind for kind, _ in TABLE} >= {
        kind for kind in classes() if kind.__name__ not in ONLY_A_BASE
    }


@pytest.mark.parametrize("name", CAUSES)
def test_the_sentences_are_said_somewhere(name: str) -> None:
    for words, advice in CAUSES[name]:
        pattern = re.escape(words).replace("…", r"\S.*")
        assert re.search(pattern, sentences()), f"{name}: nobody says {words!r}"
        assert advice
