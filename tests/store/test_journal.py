import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratagem.common.errors import ConflictError, IntegrityError, UnavailableError
from stratagem.common.ids import RunId
from stratagem.coordinator.journal import (
    DuplicateKeyError,
    FencedError,
    Holder,
    Journal,
    Record,
    journal,
)
from tests.store.programs import run

A, B = RunId("a-1"), RunId("b-2")
US = Holder.of_this_process("us")
ELSEWHERE = Holder("they", "another host", 1, 1)


def record(run_id: RunId, seq: int, key: str | None = None, time_s: float = 0.0) -> Record:
    return Record(run_id, seq, "StepDone", 1, f'{{"seq":{seq}}}', time_s, 1e9 + seq, key)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def log(path: Path) -> Iterator[Journal]:
    opened = Journal.open(path)
    yield opened
    opened.close()


class FakeTime:
    """A monotonic clock that a sleep moves; `jumps` are added to single sleeps."""

    def __init__(self, *jumps: float) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self.jumps = list(jumps)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now_s += duration_s + (self.jumps.pop(0) if self.jumps else 0)


def lead(log: Journal, holder: Holder = US) -> int:
    """Take a lead that is free."""
    time = FakeTime()
    term = log.take_lead(holder, ttl_s=10, monotonic=time.monotonic, sleep=time.sleep).term
    assert not time.sleeps
    return term


def test_events_come_back_in_the_order_of_all_runs(
    log: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_PAGE_ROWS", 2)
    term = lead(log)
    written = [record(A, 0), record(B, 0), record(RunId(""), 0), record(A, 1, "k"), record(A, 2)]
    positions = [p for r in written[:3] for p in log.append(term, [r])]
    positions += log.append(term, written[3:])
    assert positions == [1, 2, 3, 4, 5]
    reopened = Journal.open(path)
    assert [each.record for each in reopened.replay()] == written
    assert [(each.position, each.term) for each in reopened.replay()] == [(p, 1) for p in positions]
    assert [each.record.seq for each in reopened.read(A)] == [0, 1, 2]
    assert [each.record.seq for each in reopened.read(A, 2)] == [2]
    assert list(reopened.read(RunId("c"))) == []
    assert log.append(term, []) == []
    reopened.close()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(st.tuples(st.sampled_from([A, B]), st.text()), max_size=4)))
def test_replay_is_the_batches_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[RunId, str]]]
) -> None:
    log = Journal.open(tmp_path_factory.mktemp("journal") / "journal.db")
    term, counts, expected = lead(log), {A: 0, B: 0}, []
    for batch in batches:
        rows = []
        for run_id, payload in batch:
            rows.append(replace(record(run_id, counts[run_id]), payload=payload))
            counts[run_id] += 1
        log.append(term, rows)
        expected += rows
    assert [each.record for each in log.replay()] == expected
    log.close()


def test_a_key_is_used_once_in_a_run_and_a_refused_batch_leaves_nothing(log: Journal) -> None:
    term = lead(log)
    log.append(term, [record(A, 0, "k")])
    with pytest.raises(DuplicateKeyError, match="'k'") as raised:
        log.append(term, [record(A, 1, "fresh"), record(A, 2, "k")])
    assert (raised.value.run_id, raised.value.idem_key) == (A, "k")
    with pytest.raises(DuplicateKeyError):
        log.append(term, [record(A, 1, "twice"), record(A, 2, "twice")])
    log.append(term, [record(B, 0, "k"), record(B, 1), record(B, 2)])
    assert [each.record.seq for each in log.read(A)] == [0]


def test_an_event_number_is_used_once(log: Journal) -> None:
    term = lead(log)
    log.append(term, [record(A, 0)])
    with pytest.raises(ConflictError, match="'a-1' 0") as raised:
        log.append(term, [record(A, 0)])
    assert not isinstance(raised.value, DuplicateKeyError)


def test_the_loser_of_the_lead_writes_nothing(log: Journal, path: Path) -> None:
    old = lead(log, ELSEWHERE)
    log.append(old, [record(A, 0)])
    other, time = Journal.open(path), FakeTime()
    new = other.take_lead(US, ttl_s=10, monotonic=time.monotonic, sleep=time.sleep)
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
    assert [(each.term, each.record.seq) for each in log.replay()] == [(1, 0), (2, 1)]
    other.close()


def test_a_released_lead_is_free_and_cannot_write(log: Journal) -> None:
    term = lead(log, ELSEWHERE)
    log.release(term)
    with pytest.raises(FencedError, match="released"):
        log.append(term, [record(A, 0)])
    assert lead(log) == term + 1


def test_a_silent_leader_elsewhere_is_given_its_ttl(log: Journal) -> None:
    lead(log, ELSEWHERE)
    time = FakeTime()
    log.take_lead(US, ttl_s=10, monotonic=time.monotonic, sleep=time.sleep)
    assert time.sleeps == [2.0] * 5


def test_a_pause_of_the_whole_machine_is_not_the_silence_of_the_leader(log: Journal) -> None:
    lead(log, ELSEWHERE)
    time = FakeTime(0.0, 3600.0)
    log.take_lead(US, ttl_s=10, monotonic=time.monotonic, sleep=time.sleep)
    assert time.sleeps == [2.0] * 5


def test_each_renewal_begins_the_wait_anew(log: Journal, path: Path) -> None:
    term, other, time = lead(log, ELSEWHERE), Journal.open(path), FakeTime()

    def sleep(duration_s: float) -> None:
        time.sleep(duration_s)
        if len(time.sleeps) in (4, 8):
            log.renew(term)

    taken = other.take_lead(US, ttl_s=10, monotonic=time.monotonic, sleep=sleep)
    assert taken.term == term + 1
    assert len(time.sleeps) == 8 + 5
    other.close()


def test_of_two_who_wait_one_leads(log: Journal, path: Path) -> None:
    term, other, time = lead(log, ELSEWHERE), Journal.open(path), FakeTime()

    def sleep(duration_s: float) -> None:
        time.sleep(duration_s)
        if len(time.sleeps) == 5:  # the other is a moment faster
            other_time = FakeTime()
            other.take_lead(
                ELSEWHERE, ttl_s=10, monotonic=other_time.monotonic, sleep=other_time.sleep
            )

    taken = log.take_lead(US, ttl_s=10, monotonic=time.monotonic, sleep=sleep)
    assert taken.term == term + 2
    assert len(time.sleeps) == 10
    other.close()


def test_a_wait_can_be_given_up(log: Journal) -> None:
    term = lead(log, ELSEWHERE)

    def sleep(duration_s: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        log.take_lead(US, ttl_s=10, sleep=sleep)
    log.renew(term)


def test_a_holder_that_died_on_this_host_is_replaced_at_once(log: Journal, path: Path) -> None:
    code = """
from stratagem.coordinator.journal import Holder, Journal
print(Journal.open(Path(sys.argv[1])).take_lead(Holder.of_this_process(), ttl_s=10).term)
"""
    assert run(code, path) == (0, "1\n")
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
    assert [each.record.run_id for each in log.replay()] == [A]
    log.release(term)
    taken = log.take_lead(US, ttl_s=10)
    assert taken.last_time_s == 7.25
    assert log.append(taken.term, [record(A, 1, time_s=9.0)]) == [3]  # positions are not reused
    log.release(taken.term)
    assert log.take_lead(US, ttl_s=10).last_time_s == 9.0


def test_the_file_is_for_its_owner_and_survives_a_power_cut(log: Journal, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    pragmas = [
        log._writer.exec_driver_sql(f"PRAGMA {name}").scalar()
        for name in ("journal_mode", "synchronous")
    ]
    assert pragmas == ["wal", 2]


def test_a_file_of_a_newer_version_is_refused(log: Journal, path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    connection.close()
    with pytest.raises(ConflictError, match="newer version"):
        Journal.open(path)


def test_what_is_no_journal_is_refused(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(IntegrityError, match="damaged"):
        Journal.open(path)


def test_a_lock_that_is_held_too_long_is_an_error_that_passes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.coordinator.journal.sqlite._BUSY_TIMEOUT_S", 0.01)
    log = Journal.open(path)
    term = lead(log)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="locked"):
        log.append(term, [record(A, 0)])
    other.execute("ROLLBACK")
    other.close()
    log.append(term, [record(A, 0)])
    log.close()


def test_a_full_disk_loses_nothing_that_was_acknowledged(path: Path) -> None:
    code = """
from stratagem.common.errors import UnavailableError
from stratagem.coordinator.journal import Holder, Journal, Record
log = Journal.open(Path(sys.argv[1]))
term = log.take_lead(Holder.of_this_process(), ttl_s=10).term
def append(seq):
    log.append(term, [Record("a", seq, "K", 1, "x" * 9000, 0.0, 0.0)])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
seq = 0
try:
    while True:
        append(seq)
        seq += 1
except UnavailableError as error:
    print(seq)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
append(seq)
"""
    status, out = run(code, path)
    log = Journal.open(path)
    assert status == 0
    assert int(out) > 5
    assert [each.record.seq for each in log.replay()] == list(range(int(out) + 1))
    log.close()
