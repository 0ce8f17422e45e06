"""Which items are worth a line, and how often lines come where there is no terminal."""

import io
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from stratagem.client.cli.shared import Detail, Format, PlainConsole, RunDisplay, show
from stratagem.client.course.views import Event, Phase, Progress
from stratagem.client.terminal.followed import FollowedRun
from tests.client.terminal.items import (
    closed,
    fact,
    finished,
    generation,
    rejected,
    selected,
    steps,
    update,
)

pytestmark = pytest.mark.core

BEGIN = [
    fact("RunSubmitted", Phase.PENDING, "submitted"),
    fact("MembersFormed", sentence="members are w0", membership=1),
    fact("ModelBuilt", sentence="model built: 4 parameters"),
]
END = fact("RunCompleted", Phase.COMPLETED, "completed: all")


class Clock:
    """Gives each item a second."""

    def __init__(self, seconds_each: float) -> None:
        self.now_s, self.each_s = 0.0, seconds_each

    def __call__(self) -> float:
        return self.now_s

    def passing(self, items: Iterable[Event | Progress]) -> Iterable[Event | Progress]:
        for item in items:
            yield item
            self.now_s += self.each_s


def told(
    *items: Event | Progress,
    strategy: str = "Local",
    seconds_each: float = 10.0,
    detail: Detail = Detail.MILESTONES,
    known: int = 0,
) -> list[str]:
    """The lines that are printed where there is no terminal."""
    run = FollowedRun("mine-1", "mine", strategy, "test.accuracy", num_segments=30)
    clock, out = Clock(seconds_each), io.StringIO()
    events = (
        replace(item, index=index) if isinstance(item, Event) else item
        for index, item in enumerate(items)
    )
    console = PlainConsole(file=out, width=1000)
    show(console, Format.TEXT, clock.passing(events), RunDisplay(run, detail, known, clock))
    return [line.removeprefix("mine-1  ") for line in out.getvalue().splitlines()]


def federated(num_rounds: int, num_clients: int = 13) -> Iterable[Event]:
    yield from BEGIN
    for number in range(1, num_rounds + 1):
        yield selected(number, num_clients)
        yield fact("ClientsAssigned", round_num=number, assignments=[])
        if number % 5 == 1 and number > 1:
            yield fact("Evaluated", segment=number - 1, metrics={"test.accuracy": 0.67})
        yield from (update(number, client) for client in range(num_clients - 1))
        yield rejected(number, num_clients - 1)
        yield closed(number, range(num_clients - 1), train_loss=1.5)
        yield fact("SegmentCommitted", segment=number, step=number, metrics={"train.loss": 1.5})
    yield END


def test_a_line_for_each_segment() -> None:
    committed = fact("SegmentCommitted", segment=1, step=100, metrics={"test.accuracy": 0.9})
    redone = finished(2, num_redone_steps=3, metrics={})
    assert told(*BEGIN, finished(1), committed, redone, END)[3:] == [
        "segment 1/30  step 100  mean loss 0.500  test.accuracy 0.900  test.loss 0.250  500 rows/s",
        "3%  step 100  test.accuracy 0.900  test.loss 0.250",
        "segment 2/30  step 200  mean loss 0.500  500 rows/s  3 steps done again",
        "COMPLETED  completed: all",
    ]


def test_a_line_for_each_round_and_thirty_are_at_most_forty() -> None:
    run = FollowedRun("mine-1", "mine", "Federated/FedAvg", "test.accuracy", num_segments=30)
    shown = RunDisplay(run)
    items = list(federated(30))
    lines = [found.text for item in items if (found := shown.fold(item))]
    assert len(items) > 448
    assert len(lines) <= 40
    assert lines[:2] == ["submitted", "members are w0"]
    assert lines[7:9] == [
        "round 5/30  12 of 13 done, 1 rejected  loss 1.50",
        "round 6/30  12 of 13 done, 1 rejected  loss 1.50  test.accuracy 0.670 (after round 5)",
    ]
    assert lines[9] == "round 7/30  12 of 13 done, 1 rejected  loss 1.50"
    assert lines[-1] == "COMPLETED  completed: all"


def test_a_line_for_each_generation() -> None:
    formed = fact("PopulationFormed", params=[{}] * 3, sentence="population formed")
    member = fact("MembersFormed", party="member1", membership=1)
    lines = told(
        *(BEGIN[0], formed, member, finished(1, party="member1")),
        *(generation(1, [0.5, 0.94], 1, copies=2), END),
        strategy="PopulationBased/Truncation",
        seconds_each=0.1,
    )
    assert lines == ["submitted", "COMPLETED  completed: all"]
    run = FollowedRun("mine-1", strategy="PopulationBased", scored_by="test.accuracy")
    found = RunDisplay(run).fold(generation(1, [0.5, 0.94], 1, copies=2))
    assert found
    assert found.text == "generation 1  best 0.940 (member 1)  optimizer.lr 0.031  2 copied"


def test_without_a_terminal_a_line_comes_every_five_seconds() -> None:
    items: list[Event | Progress] = [*BEGIN, *map(steps, range(1, 200)), END]
    lines = told(*items, seconds_each=0.25)
    assert (lines[0], lines[-1]) == ("submitted", "COMPLETED  completed: all")
    assert lines[1] == "3%  step 18/600  loss 2.83  1,210 rows/s"
    assert [line.split("  ")[1] for line in lines[1:-1]] == [
        f"step {step}/600" for step in range(18, 200, 20)
    ]


def test_nothing_comes_after_the_end() -> None:
    lines = told(*BEGIN, END, steps(600), seconds_each=10.0)
    assert lines.count("COMPLETED  completed: all") == 1


def test_what_goes_wrong_is_always_said() -> None:
    trouble = [
        fact("ProcessDied", party="member1", sentence="the process of w1 ended"),
        fact("MembersFormed", Phase.RECOVERING, "members are nobody", membership=2),
        fact("ModelBuilt", sentence="model built; warning: few rows", warning="few rows"),
        fact("ModelBuilt", sentence="model built; Single converts", conversion="Single converts"),
        fact("RunFailed", Phase.FAILED, "failed: no worker"),
        fact("RunReleased", Phase.FAILED, "its workers are free again"),
    ]
    waits = [steps(0, reason="waits for w1")] * 2
    assert told(*BEGIN, *trouble[:2], *waits, *trouble[2:], seconds_each=0.0) == [
        "submitted",
        "RUNNING  the process of w1 ended",
        "RECOVERING  members are nobody",
        "RECOVERING  waits for w1",
        "RUNNING  model built; warning: few rows",
        "model built; Single converts",
        "FAILED",
    ]


def test_an_end_says_how_far_the_run_has_come() -> None:
    """Why it has failed follows as the error of the command."""
    stopped = fact("RunCancelled", Phase.CANCELLED, "cancelled: asked")
    assert told(*BEGIN, finished(2), stopped)[-1] == "CANCELLED  at step 200"
    assert (
        told(*BEGIN, END, fact("RunReleased", Phase.COMPLETED))[-1] == "COMPLETED  completed: all"
    )


def test_a_failure_tells_the_committed_step_from_that_of_the_error() -> None:
    committed = fact("SegmentCommitted", segment=2, step=200)
    error = {"type": "ValueError", "activity": "training step 347"}
    failed = fact("RunFailed", Phase.FAILED, "failed: it", error=error)
    crashed = fact("RunFailed", Phase.FAILED, "failed: workers die", error=None)
    begin = [*BEGIN, finished(2), committed]
    text = "FAILED  committed to step 200"
    assert told(*begin, failed)[-1] == f"{text}; failed in step 347"
    assert told(*begin, steps(320), crashed)[-1] == f"{text} of 600; failed after step 320"
    assert told(*begin, crashed)[-1] == text
    back = fact("RunResumed", from_segment=1, step=100)
    assert told(*begin, back, crashed)[-1] == "FAILED  committed to step 100"


def test_every_event_or_only_the_end_is_asked_for() -> None:
    items = list(federated(2))
    assert len(told(*items, detail=Detail.EVENTS, seconds_each=0.0)) == len(items)
    assert told(*items, detail=Detail.END) == []


def test_what_was_known_is_counted_and_not_said() -> None:
    items = list(federated(3))
    lines = told(*items, strategy="Federated/FedAvg", known=len(items) - 2, seconds_each=0.0)
    assert lines == [
        "10%  round 3/30  12 of 13 done, 1 rejected  loss 1.50",
        "COMPLETED  completed: all",
    ]


def test_the_verifier_is_no_part_of_the_run_and_a_refutation_is_always_said() -> None:
    of: dict[str, Any] = {"party": "verifier", "segment": 1, "step": 100}
    verifying = [
        fact("MembersFormed", party="verifier", membership=1, sentence="verifier: members are w1"),
        finished(1, party="verifier", loss=7.0, metrics={"test.accuracy": 0.1}),
        fact("SegmentCommitted", **of, metrics={"test.accuracy": 0.1}),
        fact("PartyFailed", **of, sentence="verifier: failed: its code raised"),
    ]
    verified = fact("SegmentVerified", segment=1, step=100, sentence="segment 1 verified by w1")
    run = FollowedRun("mine-1", "mine", "Local", "test.accuracy", num_segments=30)
    shown = RunDisplay(run)
    begun = [shown.fold(item) for item in BEGIN]
    assert all(begun)
    assert not any(shown.fold(item) for item in (*verifying, verified))
    assert not run.has_begun
    assert (run.step, run.mean_loss, run.metrics) == (0, None, {})
    assert run.sentence == verified.sentence
    refuted = fact("SegmentRefuted", segment=1, step=100, sentence="segment 1 differs")
    back = fact("RunResumed", from_segment=0, step=0, sentence="resumed from commit 0")
    told_at_once = told(*BEGIN, finished(1), *verifying, refuted, back, END, seconds_each=0.0)
    assert told_at_once == [
        *("submitted", "REFUTED  segment 1 differs"),
        *("resumed from commit 0", "COMPLETED  completed: all"),
    ]
    everything = told(*BEGIN, *verifying, detail=Detail.EVENTS)
    assert everything[-1] == "RUNNING  verifier: failed: its code raised"
