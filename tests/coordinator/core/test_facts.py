"""Facts come back from the journal as they went in, also those of earlier schemas."""

import json
import math
from typing import Any

import pytest

from stratagem.common.base.ids import Digest
from stratagem.coordinator.core.facts import (
    ROOT,
    Evaluated,
    Noted,
    RunCancelled,
    SegmentCommitted,
    fact_serialization,
)
from stratagem.coordinator.core.facts.fact_serialization import decode, encode, payload_now

pytestmark = pytest.mark.core

COMMITTED = SegmentCommitted(
    party=ROOT, segment=1, step=2, digest=Digest("0" * 64), size_bytes=3, metrics={}
)

TAKEN = {"client": 1, "digest": "d", "num_samples": 2}
CLOSED = {
    "party": "",
    "round_num": 1,
    "accepted": [],
    "reason": "all",
    "by_policy": False,
    "metrics": {},
}


def test_each_schema_between_is_passed_and_those_that_changed_nothing_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rename(payload: dict[str, Any]) -> dict[str, Any]:
        return {"reason": payload["why"]}

    monkeypatch.setattr(fact_serialization, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(fact_serialization, "UPGRADES", {("RunCancelled", 2): rename})
    assert decode("RunCancelled", 1, '{"why":"no reason"}') == RunCancelled(reason="no reason")
    assert decode("RunCancelled", 3, '{"reason":"no reason"}') == RunCancelled(reason="no reason")
    assert decode("SegmentCommitted", 1, encode(COMMITTED)[1]) == COMMITTED


@pytest.mark.parametrize(
    ("kind", "schema"), [("RunCancelled", fact_serialization.SCHEMA_VERSION + 1), ("RunPainted", 1)]
)
def test_what_a_newer_version_wrote_is_refused(kind: str, schema: int) -> None:
    with pytest.raises(ValueError, match=f"{kind} of schema {schema}, written by a newer version"):
        decode(kind, schema, "{}")


def test_metrics_that_are_not_finite_come_back() -> None:
    metrics = {"test.loss": math.nan, "test.perplexity": math.inf, "test.gap": -math.inf}
    kind, payload = encode(Evaluated(party=ROOT, segment=3, metrics=metrics | {"a": 0.1}))
    json.loads(payload, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    fact = decode(kind, 1, payload)
    assert isinstance(fact, Evaluated)
    assert {name: str(value) for name, value in fact.metrics.items()} == {
        "test.loss": "nan",
        "test.perplexity": "inf",
        "test.gap": "-inf",
        "a": "0.1",
    }


def test_a_plain_value_that_is_not_finite_is_refused_where_it_is_told_of() -> None:
    """It would be a number until a replay makes the text of it that stands in the journal."""
    with pytest.raises(ValueError, match=r"scores\[1\]: nan is not a finite number"):
        Noted(party=ROOT, kind="chosen", data={"scores": [0.5, math.nan]})
    noted = Noted(party=ROOT, kind="chosen", data={}, metrics={"test.loss": math.nan})
    with pytest.raises(ValueError, match="rate: inf is not a finite number"):
        noted.model_copy(update={"data": {"rate": math.inf}})
    with pytest.raises(ValueError, match="segment"):
        noted.model_copy(update={"segment": "first"})
    kind, payload = encode(noted.model_copy(update={"data": {"rate": 0.5}}))
    assert str(decode(kind, 1, payload)) == str(noted.model_copy(update={"data": {"rate": 0.5}}))


def test_a_journal_that_holds_null_for_them_can_be_read() -> None:
    payload = '{"party":"","segment":3,"metrics":{"test.loss":null}}'
    fact = decode("Evaluated", 1, payload)
    assert isinstance(fact, Evaluated)
    assert math.isnan(fact.metrics["test.loss"])


def test_halves_of_surrogates_come_back_which_only_one_of_two_readers_of_json_knows() -> None:
    assert decode("RunCancelled", 1, '{"reason":"\\ud800"}') == RunCancelled(reason="\ud800")


def test_a_payload_is_shown_as_it_is_stored_where_that_says_all_of_the_fact() -> None:
    now = '{"reason": "no reason", "by": ""}'
    assert payload_now("RunCancelled", decode("RunCancelled", 1, now), now) is now


@pytest.mark.parametrize(
    ("kind", "stored", "shown"),
    [
        ("RunCancelled", '{"reason": "x"}', {"reason": "x", "by": ""}),
        (
            "Evaluated",
            '{"party": "", "segment": 3, "metrics": {"a": null}, "predictions": "", "without": []}',
            {"party": "", "segment": 3, "metrics": {"a": "NaN"}, "predictions": "", "without": []},
        ),
        (
            "RoundClosed",
            json.dumps(CLOSED | {"accepted": [TAKEN]}),
            CLOSED | {"accepted": [{**TAKEN, "staleness": 0, "base": ""}]},
        ),
    ],
    ids=["a field is missing", "null is a number", "a part may lack a field"],
)
def test_another_payload_is_shown_as_this_version_writes_it(
    kind: str, stored: str, shown: dict[str, Any]
) -> None:
    assert json.loads(payload_now(kind, decode(kind, 1, stored), stored)) == shown
