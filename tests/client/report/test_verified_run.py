"""Pictures of a run that was verified while it trained; its verifier is no part of the others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stratagem.client.course.views import Event, Phase
from stratagem.client.pictures.parties import AgainExecuted, SegmentCheck, verification
from stratagem.client.report.pages import page
from stratagem.client.report.run import ReportedRun, RunCourse
from stratagem.client.report.run_panels import verification_panels
from stratagem.common.numerics.verification import share_of
from tests.client.report.reported import reported
from tests.client.run_facts import committed, events_of

pytestmark = pytest.mark.core

JOB = {"seed": 7, "verification": {"sample": 1.0, "on": "spare"}}
Fact = tuple[str, Mapping[str, Any]]


def verified(segment: int, *workers: str) -> Fact:
    return "SegmentVerified", {"segment": segment, "step": 10 * segment, "workers": workers}


def refuted(segment: int, conclusion: str, digests: str, *workers: str, **names: Any) -> Fact:
    of = {"segment": segment, "step": 10 * segment, "conclusion": conclusion, "marked": ()}
    listed = [[worker] for worker in workers]
    more = {"digests": list(digests), "workers": listed, "quarantined": (), **names}
    return "SegmentRefuted", {**of, **more}


def commit(segment: int, party: str = "", **more: Any) -> Fact:
    return committed(segment, 10 * segment, "d", party, metrics={"train.loss": 1.0}, **more)


def results(*facts: Fact, job: Mapping[str, Any] = JOB) -> list[tuple[int, str]]:
    checks = RunCourse.of(events_of(facts), job).verification.checks
    return [(check.segment, check.result) for check in checks]


def test_each_segment_has_its_result() -> None:
    three = (commit(1), commit(2), commit(3, is_partial=True), commit(4))
    assert results(*three) == [(1, "waits"), (2, "waits"), (4, "waits")]
    assert results(*three, verified(2, "b")) == [(1, "not verified"), (2, "verified"), (4, "waits")]
    end: Fact = ("RunCompleted", {})
    over = results(*three, verified(1, "b"), end)
    assert over == [(1, "verified"), (2, "not verified"), (4, "not verified")]
    again: Fact = ("RunResumed", {"from_segment": None})
    assert results(*three, end, again)[0] == (1, "waits")
    assert results(*three, job={"seed": 7}) == []
    sampled = results(*three, job={**JOB, "verification": {"sample": 0.5}})
    assert sampled == [
        (number, "waits" if share_of(7, number) < 0.5 else "not chosen") for number in (1, 2, 4)
    ]


def test_a_run_that_returns_keeps_the_refutation_and_is_verified_anew() -> None:
    wrong = refuted(2, "RUN", "xyyx", "a", "b", "c", "a", quarantined=("a",))
    back: Fact = ("RunResumed", {"from_segment": 1, "step": 10})
    facts = (commit(1), verified(1, "b"), commit(2), commit(3), wrong, back)
    assert results(*facts) == [(1, "verified"), (2, "refuted")]
    once_more = RunCourse.of(events_of((*facts, commit(2), verified(2, "b"))), JOB)
    first, found, anew = once_more.verification.checks
    assert (first.result, anew.result) == ("verified", "verified")
    assert (found.start, found.end, tuple(found.suspected)) == (10, 20, ("a",))
    told = [(list(one.workers), one.is_right) for one in found.executions]
    assert told == [(["b"], True), (["c"], True), (["a"], False)]


@pytest.mark.parametrize(
    ("conclusion", "digests", "result", "right"),
    [
        ("VERIFIER", "xyx", "verifier wrong", [False, True]),
        ("JOB", "xyz", "open", [None, None]),
        ("OPEN", "xy", "open", [None]),
        ("RUN", "", "refuted", []),
    ],
)
def test_who_was_right_follows_from_the_conclusion(
    conclusion: str, digests: str, result: str, right: list[bool | None]
) -> None:
    names = "abc"[: max(len(digests), 1)]
    fact = refuted(1, conclusion, digests, *names)
    checks = RunCourse.of(events_of((commit(1), fact, commit(2))), JOB).verification.checks
    assert [one.is_right for one in checks[0].executions] == right
    later = "not verified" if result == "open" else "waits"
    assert [check.result for check in checks] == [result, later]


def test_nothing_of_the_verifier_is_part_of_the_run() -> None:
    of_verifier = [
        ("MembersFormed", {"party": "verifier", "members": [], "reason": "", "membership": 1}),
        ("SegmentFinished", {"party": "verifier", "segment": 1, "step": 10, "seconds": 1.0}),
        commit(1, "verifier"),
    ]
    with_it = RunCourse.of(events_of((commit(1), *of_verifier)), JOB)
    without = RunCourse.of(events_of((commit(1),)), JOB)
    assert with_it.num_events == 4
    assert with_it.parties.keys() == {""}
    assert with_it.members.intervals == ()
    assert with_it.time_marks.spans == without.time_marks.spans
    assert with_it.root.lines == without.root.lines


def test_page_and_panel_show_what_is_verified() -> None:
    run = reported("golden-allreduce", verification="1 of 3 chosen segments verified")
    own = commit(1, "verifier")
    events = list(run.events)
    for kind, payload in (own, verified(1, "worker-9")):
        fact = {"party": "", **payload}
        events.append(Event(len(events), events[-1].time_s, kind, kind, fact, Phase.RUNNING))
    status = replace(run.status, job={**run.job, "verification": {"sample": 1.0}})
    shown = ReportedRun.of(status, events)
    assert [event.kind for event in shown.events[-2:]] != ["SegmentCommitted", "SegmentVerified"]
    (panel,) = verification_panels(shown)
    assert panel.note == status.verification
    assert "worker-9" in panel.draw(720).svg
    html = page(shown, "now")
    assert "1 of 3 chosen segments verified" in html
    assert "Verification" in html
    assert verification_panels(run) == []


def test_the_table_of_very_many_segments_names_those_that_are_not_verified() -> None:
    right = [AgainExecuted(["b"], is_right=True)]
    many = [SegmentCheck(n, n, n + 1, "verified", executions=right) for n in range(300)]
    many[150] = SegmentCheck(150, 150, 151, "not verified")
    assert [row[0] for row in verification(many, title="V").table.rows] == ["150"]
    assert "299 verified" in verification(many, title="V").svg
