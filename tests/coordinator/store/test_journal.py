"""What every journal promises, over SQLite and over PostgreSQL."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import ConflictError
from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Recorder, Series, joined
from stratagem.common.history.recording import pack, unpack
from stratagem.coordinator.store import step_history
from stratagem.coordinator.store.journal import DuplicateKeyError, Journal, RunSummary
from stratagem.coordinator.store.lead import FencedError, Holder
from stratagem.coordinator.store.step_history import HistoryRow, StepSpan, one_row
from tests.coordinator.store.journals import ELSEWHERE, US, A, B, events, lead, record
from tests.programs import run


@pytest.fixture(name="place", params=["sqlite", "postgres"])
def _place(request: pytest.FixtureRequest, journal_place: Callable[[str], str]) -> str:
    return journal_place(request.param)


@pytest.fixture
def log(place: str) -> Iterator[Journal]:
    opened = Journal.open(place)
    yield opened
    opened.close()


def test_events_come_back_in_the_order_of_all_runs(log: Journal, place: str) -> None:
    term = lead(log)
    written = [record(A, 0), record(B, 0), record(RunId(""), 0), record(A, 1, "k"), record(A, 2)]
    positions = [p for r in written[:3] for p in log.append(term, [r])]
    positions += log.append(term, written[3:])
    assert positions == [1, 2, 3, 4, 5]
    reopened = Journal.open(place)
    assert [each.record for each in events(reopened)] == written
    assert [(each.position, each.term) for each in events(reopened)] == [(p, 1) for p in positions]
    assert [each.record.seq for each in reopened.read(A)] == [0, 1, 2]
    by_two = islice(reopened.read(A, page_rows=2), 9)
    assert [each.record.seq for each in by_two] == [0, 1, 2]
    assert [each.record.seq for each in reopened.read(A, 2)] == [2]
    assert list(reopened.read(RunId("c"))) == []
    assert log.append(term, []) == []
    reopened.close()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(st.tuples(st.sampled_from([A, B]), st.text()), max_size=4)))
def test_replay_is_the_batches_one_after_the_other(
    log: Journal, batches: list[list[tuple[RunId, str]]]
) -> None:
    """One journal for all examples, as each of them goes on where the last one ended."""
    before = [each.record for each in events(log)]
    term, expected = lead(log), list(before)
    counts = {run_id: sum(each.run_id == run_id for each in before) for run_id in (A, B)}
    for batch in batches:
        rows = []
        for run_id, text in batch:
            rows.append(replace(record(run_id, counts[run_id]), payload=json.dumps(text)))
            counts[run_id] += 1
        log.append(term, rows)
        expected += rows
    log.release(term)
    assert [each.record for each in events(log)] == expected


def test_keys_and_numbers_are_used_once_in_a_run_and_a_refused_batch_leaves_nothing(
    log: Journal,
) -> None:
    term = lead(log)
    log.append(term, [record(A, 0, "k")])
    with pytest.raises(DuplicateKeyError, match="'k'") as raised:
        log.append(term, [record(A, 1, "fresh"), record(A, 2, "k")])
    assert (raised.value.run_id, raised.value.idem_key) == (A, "k")
    with pytest.raises(DuplicateKeyError):
        log.append(term, [record(A, 1, "twice"), record(A, 2, "twice")])
    log.append(term, [record(B, 0, "k"), record(B, 1), record(B, 2)])
    assert [each.record.seq for each in log.read(A)] == [0]
    with pytest.raises(ConflictError, match="'a-1' 0") as other:
        log.append(term, [record(A, 0)])
    assert not isinstance(other.value, DuplicateKeyError)


def test_the_loser_of_the_lead_writes_nothing(log: Journal, place: str) -> None:
    old = lead(log, ELSEWHERE)
    log.append(old, [record(A, 0)])
    other = Journal.open(place)
    new = other.take_lead(US, ttl_s=0.05)
    assert new.term == old + 1
    for act in (
        lambda: log.append(old, [record(A, 1)]),
        lambda: log.renew(old),
        lambda: log.delete_run(old, A),
    ):
        with pytest.raises(FencedError, match="term 1 no longer leads: term 2 does"):
            act()
    log.release(old)  # must not release what is not ours
    other.append(new.term, [record(A, 1)])
    assert [(each.term, each.record.seq) for each in events(log)] == [(1, 0), (2, 1)]
    other.close()


def test_a_released_lead_is_free_and_cannot_write_and_a_wait_can_be_given_up(log: Journal) -> None:
    term = lead(log, ELSEWHERE)
    log.release(term)
    with pytest.raises(FencedError, match="released"):
        log.append(term, [record(A, 0)])
    assert lead(log, ELSEWHERE) == term + 1

    def sleep(duration_s: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        log.take_lead(US, ttl_s=10, sleep=sleep)
    log.renew(term + 1)


def test_a_holder_that_died_on_this_host_is_replaced_at_once(log: Journal, place: str) -> None:
    code = """
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
print(Journal.open(sys.argv[1]).take_lead(Holder.of_this_process(), ttl_s=10).term)
"""
    assert run(code, place) == (0, "1\n")
    assert lead(log) == 2


def test_liveness_is_known_of_this_host_only() -> None:
    assert not US.is_known_dead()
    assert replace(US, started=US.started + 1).is_known_dead()  # a reused pid
    assert replace(US, pid=2**22 + 1).is_known_dead()
    assert not replace(US, pid=2**22 + 1, host="another").is_known_dead()
    assert not replace(US, pid=2**22 + 1, host="").is_known_dead()
    assert Holder.from_json(US.to_json()) == US


def test_the_clock_goes_on_where_the_last_event_was_also_when_it_is_deleted(log: Journal) -> None:
    term = lead(log)
    log.append(term, [record(A, 0, time_s=3.5), record(B, 0, time_s=7.25)])
    log.delete_run(term, B)
    assert [each.record.run_id for each in events(log)] == [A]
    log.release(term)
    taken = log.take_lead(US, ttl_s=10)
    assert taken.last_time_s == 7.25
    assert log.append(taken.term, [record(A, 1, time_s=9.0)]) == [3]  # positions are not reused
    log.release(taken.term)
    assert log.take_lead(US, ttl_s=10).last_time_s == 9.0


def summary(run_id: RunId, version: str = "1") -> RunSummary:
    return RunSummary(run_id, version, brief=f"brief {run_id}", shown=f"shown {run_id}")


def test_a_summary_holds_until_its_run_has_a_newer_event(log: Journal) -> None:
    term = lead(log)
    log.append(term, [record(B, 0), record(A, 0), record(RunId(""), 0), record(A, 1)], [summary(A)])
    assert list(log.briefs("1").items()) == [(B, None), (A, f"brief {A}"), ("", None)]
    assert log.briefs("2") == {B: None, A: None, "": None}, "another version reads events"
    assert log.shown([A, B]) == {A: f"shown {A}"}
    log.append(term, [record(A, 2)])
    assert log.briefs("1") == {B: None, A: None, "": None}
    log.append(term, [], [summary(A), summary(B, "2")])
    assert log.briefs("1") == {B: None, A: f"brief {A}", "": None}
    assert log.briefs("2") == {B: f"brief {B}", A: None, "": None}
    log.delete_run(term, A)
    assert (log.briefs("1"), log.shown([A])) == ({B: None, "": None}, {})


ALL = StepSpan()


def page(
    log: Journal, party: Party, span: StepSpan, behind: int, limit: int, run_id: RunId = A
) -> list[HistoryRow]:
    return log.ask(lambda c: step_history.page(c, run_id, party, span, behind, limit))


def history(party: str, segment: int, loss: float, wall_s: float = 0.0) -> HistoryRow:
    recorder = Recorder(1, 0)
    recorder.add(1, [(Series("train.loss"), loss), (Series("time.wall_s", True), wall_s)])
    rows = pack(recorder.end())
    return HistoryRow(A, Party(party), segment, 1, 10 * segment - 10, 10 * segment, rows)


def test_events_are_summed_up_in_the_places_of_the_last_of_them(log: Journal, place: str) -> None:
    term = lead(log)
    log.append(term, [record(A, 0), record(A, 1, "k"), record(B, 0), record(A, 2, time_s=5.0)])
    log.append(term, [record(A, 3, time_s=7.0)])
    parts = [replace(record(A, seq), kind="Summed", payload=f'"{seq}"') for seq in (1, 2)]
    with pytest.raises(ConflictError, match="not all events 3 to 4 are there"):
        log.sum_up(term, [record(A, 3), record(A, 4)])
    assert len(list(log.read(A))) == 4
    for _ in range(2):  # as when the answer to the first one is lost
        log.sum_up(term, parts)
        found = list(log.read(A))
        assert [each.record for each in found] == [
            replace(parts[0], time_s=0.0),
            replace(parts[1], time_s=5.0),
            record(A, 3, time_s=7.0),
        ]
        assert [each.position for each in found] == [2, 4, 5]
    assert [each.record for each in log.read(B)] == [record(B, 0)]
    assert log.briefs("") == {A: None, B: None}
    log.release(term)
    other = Journal.open(place)
    after = other.take_lead(US, ttl_s=10)
    assert after.last_time_s == 7.0
    with pytest.raises(FencedError):
        log.sum_up(term, parts)
    other.append(after.term, [record(A, 4)])
    other.close()


def test_histories_and_summaries_are_written_with_their_events_or_not_at_all(
    log: Journal, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = lead(log, ELSEWHERE)
    rows = [history("", 1, 2.0), history("", 2, 1.0), history("member/1", 1, 3.0)]
    log.append(old, [record(A, 0, "k")], histories=rows)
    refused = [record(A, 1), record(A, 2, "k")]
    with pytest.raises(DuplicateKeyError):
        log.append(old, refused, [summary(A)], histories=[history("", 3, 0.5)])
    assert (log.briefs("1"), log.shown([A])) == ({A: None}, {})
    assert log.ask(lambda c: step_history.parties(c, A)) == ["", "member/1"]
    assert page(log, Party(""), ALL, -1, 9) == rows[:2]
    assert page(log, Party(""), ALL, -1, 1) == rows[:1]
    assert page(log, Party(""), ALL, 1, 9) == rows[1:2]
    assert page(log, Party(""), ALL, -1, 9, run_id=B) == []
    for span, segments in ((StepSpan(11), [2]), (StepSpan(10, 10), [1]), (StepSpan(21), [])):
        assert [row.segment for row in page(log, Party(""), span, -1, 9)] == segments
    again = history("", 2, 1.0, wall_s=5.0)  # done again at another time
    log.append(old, [record(A, 1)], histories=[again])
    assert "recorded other values" not in capsys.readouterr().out
    assert page(log, Party(""), ALL, 1, 9) == [again]
    log.append(old, [record(A, 2)], histories=[history("", 2, 1.5)])
    assert "recorded other values" in capsys.readouterr().out
    other = Journal.open(place)
    term = other.take_lead(US, ttl_s=0.05).term
    for late in ([], [record(A, 3)]):
        with pytest.raises(FencedError):
            log.append(old, late, [summary(A)], histories=[history("", 4, 0.25)])
    assert (other.briefs("1"), other.shown([A])) == ({A: None}, {})
    assert len(page(other, Party(""), ALL, -1, 9)) == 2
    other.delete_run(term, A)
    assert other.ask(lambda c: step_history.parties(c, A)) == []
    assert page(other, Party(""), ALL, -1, 9) == []
    other.close()


def recorded(segment: int, party: str = "") -> HistoryRow:
    """Five steps a segment at a stride of four, so that segments share rows of what is shown."""
    recorder, first = Recorder(4, 5 * segment - 5), 5 * segment - 4
    for step in range(first, first + 5):
        recorder.add(step, [(Series("train.loss"), step / 3)])
    to_step = 5 * segment
    return HistoryRow(A, Party(party), segment, 4, to_step - 5, to_step, pack(recorder.end()))


def shown_of(log: Journal, party: str = "") -> bytes:
    rows = page(log, Party(party), ALL, -1, 99)
    parts = [unpack(row.rows)[Series("train.loss")] for row in rows]
    return joined(parts, 4).to_bytes()


def segments_of(log: Journal, party: str = "") -> list[int]:
    return [row.segment for row in page(log, Party(party), ALL, -1, 99)]


def test_merged_histories_say_the_same_and_can_be_cut_at_every_segment(
    log: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    term = lead(log, US)
    log.append(term, [record(A, 0)], histories=[recorded(i) for i in range(1, 9)])
    log.append(term, [record(A, 1)], histories=[recorded(i, "client1") for i in (2, 4)])
    before = {party: shown_of(log, party) for party in ("", "client1")}
    singles = log.ask(lambda c: step_history.single_rows(c, A, Party(""), 6))
    assert [row.segment for row in singles] == [1, 2, 3, 4, 5, 6]
    block = one_row(singles)
    assert block is not None
    assert log.merge_histories(term, singles, block)
    assert not log.merge_histories(term, singles, block), "they are no longer there"
    assert segments_of(log) == [6, 7, 8]
    assert shown_of(log) == before[""]
    assert log.ask(lambda c: step_history.counts(c, A)) == {"": 3, "client1": 2}
    assert log.ask(lambda c: step_history.full_parties(c, A, 2)) == ["", "client1"]
    assert log.ask(lambda c: step_history.full_parties(c, A, 3)) == []
    assert log.ask(lambda c: step_history.full_parties(c, B, 1)) == []
    assert log.ask(step_history.unmerged_runs) == {A}

    log.append(term, [record(A, 2)], histories=[recorded(5)])  # done again, out of the block
    assert segments_of(log) == [4, 5, 7, 8]
    log.append(term, [record(A, 3)], histories=[recorded(6)])
    assert shown_of(log) == before[""]
    log.append(term, [record(A, 4)], returns={A: 3})
    (kept,) = page(log, Party(""), ALL, -1, 99)
    assert (kept.segment, kept.to_step, kept.ends) == (3, 15, ((1, 5), (2, 10), (3, 15)))
    assert segments_of(log, "client1") == [2]
    again = [recorded(i) for i in range(4, 9)]
    log.append(term, [record(A, 5)], histories=[*again, recorded(4, "client1")])
    assert {party: shown_of(log, party) for party in before} == before
    assert "recorded other values" not in capsys.readouterr().out


def test_of_what_stages_have_done_only_the_newest_segment_is_kept(log: Journal) -> None:
    term, party = lead(log, US), "client1/actions/0"
    log.append(term, [record(A, 0)], histories=[recorded(i, party) for i in range(1, 5)])
    singles = log.ask(lambda c: step_history.single_rows(c, A, Party(party), 3))
    newest = one_row(singles)
    assert newest == singles[-1]
    assert log.merge_histories(term, singles, newest)
    assert segments_of(log, party) == [3, 4]
    log.append(term, [record(A, 1)], histories=[recorded(4, party)])  # done again
    assert segments_of(log, party) == [3, 4]
    log.append(term, [record(A, 2)], returns={A: 2})
    assert segments_of(log, party) == []


def test_a_segment_that_ends_as_the_run_returns_leaves_no_history(log: Journal) -> None:
    """A run that is verified returns while it trains: one transaction may have both."""
    term = lead(log, US)
    log.append(term, [record(A, 0)], histories=[recorded(i) for i in range(1, 3)])
    log.append(term, [record(A, 1), record(A, 2)], histories=[recorded(3)], returns={A: 1})
    assert segments_of(log) == [1]


def test_what_one_row_cannot_hold_stays_as_it_is() -> None:
    rows = []
    for number in range(2):
        recorder = Recorder(1, number)
        recorder.add(number + 1, [(Series(f"{number}.{i}"), 1.0) for i in range(200)])
        rows.append(HistoryRow(A, Party(""), number, 1, number, number + 1, pack(recorder.end())))
    assert one_row(rows) is None, "more series than a history has"
    assert one_row([recorded(1), replace(recorded(2), stride=8)]) is None
