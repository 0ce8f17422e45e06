"""What only a journal over SQLite promises: how it watches a leader, and its file."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.event import listen

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.common.base.ids import Party
from stratagem.coordinator.store import database, step_history
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.step_history import HistoryRow
from tests.coordinator.store.journals import ELSEWHERE, US, A, FakeTime, events, lead, record
from tests.programs import run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def log(path: Path) -> Iterator[Journal]:
    opened = Journal.open(path)
    yield opened
    opened.close()


@pytest.mark.parametrize("jumps", [(), (0.0, 3600.0)], ids=["awake", "the machine pauses"])
def test_a_silent_leader_elsewhere_is_given_its_ttl(log: Journal, jumps: tuple[float, ...]) -> None:
    lead(log, ELSEWHERE)
    time = FakeTime(*jumps)
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


def test_the_file_is_for_its_owner_and_survives_a_power_cut(log: Journal, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    with log._database.write() as connection:
        pragmas = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous")
        ]
    assert pragmas == ["wal", 2]


def test_whoever_looks_for_rows_to_merge_reads_no_values_of_steps(log: Journal) -> None:
    """Commits wait meanwhile: of what the steps of all runs have recorded, the keys are enough."""
    rows = [HistoryRow(A, Party(""), i, 1, i, i + 1, bytes(10)) for i in range(3)]
    log.append(lead(log, US), [record(A, 0)], histories=rows)
    asked: list[tuple[str, Any]] = []
    reader = log._database.reader
    listen(reader, "before_cursor_execute", lambda *told: asked.append((told[2], told[3])))
    assert log.ask(step_history.unmerged_runs) == {A}
    assert log.ask(lambda c: step_history.counts(c, A)) == {"": 3}
    with reader.connect() as connection:
        plans = [
            connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).scalars(3).all()
            for statement, values in [*asked]
            if "history" in statement
        ]
    assert len(plans) == 2
    assert all("USING COVERING INDEX" in " ".join(plan) for plan in plans), plans


def test_what_is_no_journal_is_refused(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(IntegrityError, match="damaged"):
        Journal.open(path)


@pytest.mark.parametrize(
    ("patience_s", "pauses_s"), [(0.0, []), (3.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])]
)
def test_a_lock_that_is_held_too_long_is_an_error_that_passes(
    path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, pauses_s: list[float]
) -> None:
    monkeypatch.setattr("stratagem.coordinator.store.database._BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("stratagem.coordinator.store.database._SQLITE_PATIENCE_S", patience_s)
    time = FakeTime()
    monkeypatch.setattr(database, "time", time)
    log = Journal.open(path)
    term = lead(log)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="locked"):
        log.append(term, [record(A, 0)])
    assert time.sleeps == pauses_s
    other.execute("ROLLBACK")
    other.close()
    log.append(term, [record(A, 0)])
    log.close()


def test_a_full_disk_loses_nothing_that_was_acknowledged(path: Path) -> None:
    code = """
from stratagem.common.base.errors import UnavailableError
from stratagem.coordinator.store import database
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
database._SQLITE_PATIENCE_S = 0.0
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
    assert [each.record.seq for each in events(log)] == list(range(int(out) + 1))
    log.close()
