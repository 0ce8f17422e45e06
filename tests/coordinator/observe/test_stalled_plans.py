"""The sentence about a run whose workers stay at one thing, and how long it stands."""

from collections.abc import Sequence

import pytest

from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.core.commands import EventSpan
from stratagem.coordinator.core.facts import PartyFailed
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.observe.feed import Feed, FeedEvent, SegmentProgress
from stratagem.coordinator.observe.troubles import StalledPlans
from stratagem.v1 import worker_pb2

pytestmark = pytest.mark.core

RUN = RunId("r")
OWN = worker_pb2.Stall(seconds=75, activity="training step 3", place="m.py, line 4, in forward")
WAITS = worker_pb2.Stall(seconds=80, awaits="a in the exchange of a step")
NAMED = (
    "a has been at training step 3 for over 75 s (m.py, line 4, in forward; its log has the stack)"
)
HIDDEN = "a worker has been at one thing for over 75 s; its clients were drawn in secret"


@pytest.mark.parametrize(
    ("stalls", "sentence"),
    [
        ({"a": OWN}, NAMED),
        ({"b": WAITS, "a": OWN}, NAMED),
        (
            {"a": worker_pb2.Stall(seconds=300, activity="building")},
            "a has been at building for over 5 min (its log has the stack)",
        ),
        ({"b": WAITS}, "b has waited for over 80 s for a in the exchange of a step"),
        (
            {"a": OWN, "b": worker_pb2.Stall(seconds=7200, activity="building")},
            "b has been at building for over 2 h (its log has the stack), and so has 1 more worker",
        ),
        (
            {"b": WAITS, "c": WAITS, "d": WAITS},
            "b has waited for over 80 s for a in the exchange of a step, and so have 2 more",
        ),
        ({"a": worker_pb2.Stall(seconds=float("nan"), activity="lying")}, ""),
        ({}, ""),
    ],
)
def test_the_worker_that_others_wait_for_is_named(
    stalls: dict[str, worker_pb2.Stall], sentence: str
) -> None:
    plans = StalledPlans()
    for worker_id, stall in stalls.items():
        plans.note(RUN, worker_id, worker_id, stall)
    assert plans.sentence(RUN) == sentence


def test_who_trains_in_secret_is_not_named() -> None:
    plans = StalledPlans()
    assert plans.note(RUN, 1, "a", OWN)
    assert plans.sentence(RUN, is_secret=True) == HIDDEN


def test_a_plan_that_comes_on_is_not_spoken_of() -> None:
    plans = StalledPlans()
    assert plans.note(RUN, 1, "a", OWN)
    assert not plans.note(RUN, 1, "a", worker_pb2.Stall())
    assert plans.sentence(RUN) == ""


def test_a_stall_outlives_facts_and_ends_with_its_word() -> None:
    async def nothing(run_id: RunId, span: EventSpan, number: int) -> Sequence[FeedEvent]:
        return []

    def event(index: int) -> FeedEvent:
        fact = PartyFailed(party=Party("other"), reason="r")
        return FeedEvent(index, 0.0, fact, RunPhase.RUNNING)

    feed = Feed(nothing)
    feed.add_event(RUN, event(0), is_last=False)
    feed.set_stall(RUN, "a stays")
    assert feed.progress(RUN) == SegmentProgress(reason="a stays")
    feed.add_event(RUN, event(1), is_last=False)
    assert feed.trouble(RUN) == "a stays"
    feed.set_stall(RUN, "")
    assert (feed.trouble(RUN), feed.progress(RUN)) == ("", SegmentProgress())
    feed.set_stall(RUN, "a stays")
    feed.set_progress(RUN, SegmentProgress(step=4))  # of another member
    feed.set_stall(RUN, "")
    assert feed.progress(RUN) == SegmentProgress(step=4)
    feed.set_stall(RUN, "a stays")
    assert feed.progress(RUN) == SegmentProgress(step=4, reason="a stays")
