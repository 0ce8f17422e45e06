"""Facts of earlier schemas are read as facts of this one, and later ones are refused."""

from typing import Any

import pytest

from stratagem.common.ids import Digest
from stratagem.coordinator.core import facts
from stratagem.coordinator.core.facts import ROOT, RunCancelled, SegmentCommitted, decode, encode

pytestmark = pytest.mark.core

COMMITTED = SegmentCommitted(
    party=ROOT, segment=1, step=2, digest=Digest("0" * 64), size_bytes=3, metrics={}
)


def test_each_schema_between_is_passed_and_those_that_changed_nothing_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rename(payload: dict[str, Any]) -> dict[str, Any]:
        return {"reason": payload["why"]}

    monkeypatch.setattr(facts, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(facts, "UPGRADES", {("RunCancelled", 2): rename})
    assert decode("RunCancelled", 1, '{"why":"no reason"}') == RunCancelled(reason="no reason")
    assert decode("RunCancelled", 3, '{"reason":"no reason"}') == RunCancelled(reason="no reason")
    assert decode("SegmentCommitted", 1, encode(COMMITTED)[1]) == COMMITTED


@pytest.mark.parametrize(
    ("kind", "schema"), [("RunCancelled", facts.SCHEMA_VERSION + 1), ("RunPainted", 1)]
)
def test_what_a_newer_version_wrote_is_refused(kind: str, schema: int) -> None:
    with pytest.raises(ValueError, match=f"{kind} of schema {schema}, written by a newer version"):
        decode(kind, schema, "{}")
