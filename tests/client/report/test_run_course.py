"""A run that is read on, event by event, is the run that is read at once; few marks tell all."""

import math
import random
from dataclasses import replace

import pytest

from stratagem.client.course.members import members
from stratagem.client.course.population import population
from stratagem.client.course.rounds import KEPT_WHOLE, clients, rounds
from stratagem.client.pictures.federation import RoundBar
from stratagem.client.pictures.federation import rounds as rounds_picture
from stratagem.client.pictures.lanes import Span, time_line
from stratagem.client.report.marks import MAX_MARKS, TimeMarks, merge_spans
from stratagem.client.report.panels import MAX_CLIENTS
from stratagem.client.report.run import MAX_POINTS, LinesFolding, RunCourse
from stratagem.client.report.run_panels import strategy_panels
from stratagem.client.report.strategy_panels import federated_panels
from tests.client.course.recorded import golden, job_of
from tests.client.report.reported import reported

RUNS = ("golden-local", "golden-killed", "golden-resumed", "golden-fedavg", "golden-quorum",
        "golden-silos", "golden-population", "golden-pipeline")  # fmt: skip


@pytest.mark.parametrize(
    ("run_id", "num_whole"),
    [*((run, KEPT_WHOLE) for run in RUNS), ("golden-quorum", 1), ("golden-silos", 1)],
)
def test_a_run_that_is_looked_at_after_each_event_is_what_all_events_say(
    run_id: str, num_whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.client.course.rounds.KEPT_WHOLE", num_whole)
    events, course = golden(run_id), RunCourse(job_of(golden(run_id)))
    for event in events:
        course.take((event,))
        for party in course.parties.values():  # what was asked for must not stay as it was
            assert party.rounds is not None
            assert party.lines is not None
        assert course.members.intervals is not None
        assert course.population.population is not None
    whole = RunCourse.of(events, job_of(events))
    assert course.num_events == len(events)
    assert course.members.intervals == members(events)
    assert course.population.population == population(events, job_of(events))
    assert course.time_marks.spans == whole.time_marks.spans
    parties = {str(event.payload.get("party") or "") for event in events} | {""}
    assert set(course.parties) == parties
    for name, party in course.parties.items():
        assert party.lines == whole.parties[name].lines
        assert party.rounds == rounds(events, name)
        assert party.clients == clients(events, name)


def test_marks_of_a_long_run_are_few_and_count_all() -> None:
    event = next(each for each in golden("golden-local") if each.kind == "SegmentFinished")
    count, marks = 5 * MAX_MARKS, TimeMarks()
    for number in range(count):
        payload = {**event.payload, "seconds": 0.25}
        marks.fold(replace(event, time_s=1000.0 + number, payload=payload), 1000.0)
    spans = marks.spans
    assert len(spans) <= 2 * MAX_MARKS
    assert sum(span.count for span in spans) == count
    assert sum(span.seconds for span in spans) == pytest.approx(0.25 * count, abs=0.3)
    picture = time_line(spans, title="Time line", end=float(count))
    assert picture.table.rows[0][:3] == ("training", "training", f"{count}")
    assert picture.svg.count("<rect") < 2000


def test_lanes_of_a_time_line_have_an_order_that_does_not_depend_on_what_came_first() -> None:
    for run_id in RUNS:
        spans = RunCourse.of(golden(run_id), job_of(golden(run_id))).time_marks.spans
        lanes = list(dict.fromkeys(span.lane for span in spans))
        known = ("members", "training", "clients", "rounds", "generations", "commits")
        assert [lane for lane in lanes if lane in known] == [
            each for each in known if each in lanes
        ]
        parties = [lane for lane in lanes if lane not in known]
        assert parties == sorted(parties)
        assert not parties or lanes.index(parties[0]) > lanes.index("members")


def test_marks_that_overlap_become_one_and_wide_ones_behind_each_other_do_not() -> None:
    found = merge_spans(
        [Span("clients", at, at + 10.0, "client") for at in (0.0, 0.0, 4.0, 10.0, 20.0)], 0.01
    )
    assert [(span.start, span.end, span.count) for span in found] == [
        (0.0, 20.0, 4),
        (20.0, 30.0, 1),
    ]
    assert sum(span.seconds for span in found) == 50.0


def test_a_picture_of_many_rounds_has_no_more_bars_than_columns_and_keeps_a_spike() -> None:
    chance = random.Random(7)
    bars = [
        RoundBar(number, chance.random(), {"done": 9, "rejected": int(number == 700)}, 8, 2.0, 3.0)
        for number in range(1, 10_001)
    ]
    bars[4321] = replace(bars[4321], loss=50.0, seconds=40.0)
    picture = rounds_picture(bars, title="Rounds", width=720)
    assert len(picture.svg) < 400_000
    assert "40 s" in picture.svg
    assert "rejected</title>" in picture.svg, "one of a column is seen"
    assert "9 done" in picture.svg
    few = rounds_picture(bars[:20], title="Rounds", width=720)
    assert "round 20: 9 done" in few.svg
    assert "rounds " not in few.svg.partition("<desc>")[2].partition("</desc>")[2]


def test_a_federation_below_the_root_has_the_pictures_of_one_that_is_the_run() -> None:
    events = golden("golden-fedavg")
    below = [
        replace(each, payload={**each.payload, "party": "silo-1"})
        if "party" in each.payload
        else each
        for each in events
    ]
    alone = federated_panels(reported("golden-fedavg"))
    run = reported("golden-fedavg")
    nested = strategy_panels(replace(run, course=RunCourse.of(below, run.job)))
    by_name = {panel.name: panel for panel in nested}
    assert {f"silo-1:{panel.name}" for panel in alone} <= set(by_name)
    for panel in alone:
        found = by_name[f"silo-1:{panel.name}"]
        assert found.draw(500).table == panel.draw(500).table
        assert found.title.startswith("silo-1: ")


def test_a_long_line_has_few_rows_that_keep_every_spike() -> None:
    event = next(each for each in golden("golden-local") if each.kind == "SegmentFinished")
    count, folding = 3 * MAX_POINTS, LinesFolding()
    for number in range(1, count + 1):
        value = 99.0 if number == 777 else math.nan if number == 778 else 1 / number
        fact = {"segment": number, "step": 10 * number, "loss": value, "metrics": {}}
        folding.fold(replace(event, payload=fact))
        if number == MAX_POINTS:
            assert not folding.lines["train.loss"].high, "as they are, while they are few"
    line = folding.lines["train.loss"]
    assert len(line.step) <= MAX_POINTS
    assert max(line.high) == 99.0
    assert (line.step[-1], line.last[-1]) == (10 * count, 1 / count)


def test_bars_of_very_many_clients_are_those_of_the_newest_rounds() -> None:
    events = golden("golden-fedavg")
    by_kind = {each.kind: each for each in events}
    member = by_kind["ClientsAssigned"].payload["assignments"][0]["member"]
    clients = range(600)
    more = [*events]
    for number in range(4, 8):
        for kind, payload in (
            ("ClientsSelected", {"clients": list(clients)}),
            (
                "ClientsAssigned",
                {"assignments": [{"client": each, "member": member} for each in clients]},
            ),
        ):
            of_kind = by_kind[kind]
            payload = {**of_kind.payload, **payload, "round_num": number}
            more.append(replace(of_kind, payload=payload, time_s=events[-1].time_s + number))
    run = reported("golden-fedavg")
    panels = strategy_panels(replace(run, course=RunCourse.of(more, run.job)))
    panel = next(each for each in panels if each.name == "members")
    picture = panel.draw(720)
    assert picture.svg.count("client ") < 2 * MAX_CLIENTS
    assert len(picture.svg) < 500_000
    assert "round 7: not answered so far" in picture.svg
    assert "round 4" not in picture.svg
    assert panel.note.endswith(f" Shows at most the newest {MAX_CLIENTS} clients.")


def test_who_is_excused_is_drawn_and_the_bench_has_a_column_where_somebody_sits() -> None:
    events = golden("golden-fedavg")
    last = events[-1]
    excused = [{"reason": "benched until round 9", "clients": [2]}]
    chosen = {"round_num": 4, "clients": [0, 1], "excused": excused, "deadline_s": None}
    more = [
        replace(last, kind="ClientBenched", payload={"client": 2, "until_round": 9}),
        replace(last, kind="ClientsSelected", payload={**chosen, "party": ""}),
    ]
    run = reported("golden-fedavg")

    def grid(course: RunCourse) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        (panel,) = [p for p in federated_panels(replace(run, course=course)) if p.name == "clients"]
        drawn = panel.draw(720)
        assert drawn.table is not None
        return drawn.svg, drawn.table.headings, [*drawn.table.rows]

    _, heads, _ = grid(RunCourse.of(events, run.job))
    assert heads == ("client", "state", "loss", "samples", "more")
    svg, heads, rows = grid(RunCourse.of([*events, *more], run.job))
    assert heads == ("client", "state", "loss", "samples", "benched until", "more")
    assert [(row[0], row[1], row[4]) for row in rows][:3] == [
        ("0", "selected", ""), ("1", "selected", ""), ("2", "excused", "round 9"),
    ]  # fmt: skip
    assert "benched until round 9" in svg
