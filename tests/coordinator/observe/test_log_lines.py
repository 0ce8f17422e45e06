"""What the log says of facts: the loop that decides ends with an exception raised here."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.ids import Incarnation, RunId, WorkerId
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts import (
    KINDS,
    ROOT,
    Copied,
    Fact,
    Member,
    MemberEvolved,
    ProcessDied,
)
from stratagem.coordinator.observe.logs import ids_of

pytestmark = pytest.mark.core

RUN = RunId("r")
MEMBER = Member(worker_id=WorkerId("w"), incarnation=Incarnation("i"))
PARAMS = st.dictionaries(st.text(max_size=3), st.none() | st.integers(), max_size=2)
COPIED = st.builds(Copied, params=PARAMS)
UNTYPED: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
    "Noted": {"data": PARAMS},
    "PopulationFormed": {"params": st.tuples(PARAMS)},
    "MemberEvolved": {"copied": st.none() | COPIED},
    "GenerationClosed": {"params": PARAMS, "copied": st.tuples(COPIED)},
}
"""Fields in which anything may stand."""


def any_fact(kind: type[Fact]) -> st.SearchStrategy[Fact]:
    """With any value of its type in each field."""
    fields: dict[str, Any] = dict.fromkeys(kind.model_fields, ...)
    return st.builds(kind, **{**fields, **UNTYPED.get(kind.__name__, {})})


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_fact_has_a_line_with_ids_that_are_json(kind: type[Fact]) -> None:
    @given(any_fact(kind))
    @settings(max_examples=3, database=None)
    def check(fact: Fact) -> None:
        assert isinstance(sentence(fact), str)
        ids = ids_of(RUN, fact)
        assert json.loads(json.dumps(ids)) == ids

    check()


def test_members_of_a_party_are_workers_and_those_of_a_population_numbers() -> None:
    evolved = MemberEvolved(party=ROOT, generation=1, member=3, score=0.5)
    assert ids_of(RUN, evolved) == {"run_id": "r", "party": ROOT, "member": 3}
    died = ProcessDied(party=ROOT, member=MEMBER, segment=1)
    assert ids_of(RUN, died)["worker_id"] == "w"
