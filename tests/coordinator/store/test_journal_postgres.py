"""What only a journal over PostgreSQL promises: its clock, its time limits, and coming back."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError
from stratagem.coordinator.store import database, schema
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import FencedError, Lease, Silence, leading, look
from tests.coordinator.store.journals import ELSEWHERE, US, A, FakeTime, lead, record
from tests.patience import PATIENCE_S
from tests.postgres import GUARDED, SOCKET, Postgres

QUICK_S = 0.3
IDLE = "idle_in_transaction_session_timeout"


def session(idle_s: float) -> list[str]:
    """What is said to a server that is to wait so long for who is idle in a transaction."""
    return [each.replace("'3s'", f"'{idle_s:g}s'") for each in database._SESSION]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may stand still inside any transaction of a test."""
    monkeypatch.setattr(database, "_SESSION", session(PATIENCE_S))


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.new_schema()


@pytest.fixture
def log(url: str) -> Iterator[Journal]:
    opened = Journal.open(url)
    yield opened
    opened.close()


# ---- the lease, by the database's clock ----


def test_a_leader_is_replaced_when_the_database_has_not_heard_of_it_for_its_ttl(
    log: Journal, url: str, postgres: Postgres
) -> None:
    term, other, time = lead(log, ELSEWHERE), Journal.open(url), FakeTime()
    # At the first look nothing but the database's clock can say, as far back as its server runs.
    ((age_s,),) = postgres.sql(
        "UPDATE lease SET renewed_s = 0"
        " RETURNING extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8",
        url,
    )
    taken = other.take_lead(US, ttl_s=age_s, monotonic=time.monotonic, sleep=time.sleep)
    assert taken.term == term + 1
    assert not time.sleeps
    with pytest.raises(FencedError):
        log.renew(term)
    other.close()


def test_the_databases_clock_counts_as_far_as_it_can_be_right() -> None:
    def looked(*looks: tuple[int, float, float]) -> float:
        """Each: renewals, silence by the database, and when we look; 1.5 s of each 2 s slept."""
        silence = Silence()
        for n, (renewals, told_s, now_s) in enumerate(looks):
            if n:
                silence.add(1.5)
            silence.look(Lease(ELSEWHERE, 1, renewals, told_s), now_s)
        return silence.seconds

    assert looked((0, 7.0, 0)) == 7.0
    assert looked((0, -3600.0, 0)) == 0.0
    assert looked((0, 7.0, 0), (0, 8.9, 2)) == 8.9
    assert looked((0, 7.0, 0), (0, 3609.0, 2)) == 9.0  # it has jumped by an hour
    assert looked((0, 7.0, 0), (0, -3590.0, 2)) == 1.5
    assert looked((0, 7.0, 0), (1, 0.3, 2)) == 0.3
    assert looked((0, 7.0, 0), (1, 3600.3, 2)) == 2.0
    assert looked((0, 0.1, 0), (1, -3600.0, 2), (1, -3598.0, 4)) == 1.5


@pytest.mark.parametrize("jump_s", [-36_000, 864_000])
def test_a_jump_of_the_databases_clock_neither_ends_nor_prolongs_a_lease(
    log: Journal, url: str, postgres: Postgres, jump_s: int
) -> None:
    # So long that what this test itself takes, by the database's clock, is next to nothing.
    ttl_s = 1000
    term, other, time = lead(log, ELSEWHERE), Journal.open(url), FakeTime()

    def sleep(duration_s: float) -> None:
        time.sleep(duration_s)
        if len(time.sleeps) == 3:
            log.renew(term)
        if len(time.sleeps) in (1, 3):  # as if the clock had jumped since the renewal
            postgres.sql(f"UPDATE lease SET renewed_s = renewed_s - {jump_s}", url)

    told: list[Lease] = []
    taken = other.take_lead(
        US, ttl_s=ttl_s, on_wait=told.append, monotonic=time.monotonic, sleep=sleep
    )
    assert taken.term == term + 1
    assert {(each.holder, each.term) for each in told} == {(ELSEWHERE, 1)}
    assert (0.6 + 0.8) * ttl_s <= sum(time.sleeps) <= (0.6 + 1.01) * ttl_s
    other.close()


def test_a_database_may_have_any_encoding(postgres: Postgres) -> None:
    """Where it has none (SQL_ASCII), text comes as bytes unless the connection says otherwise."""
    postgres.sql("CREATE DATABASE plain TEMPLATE template0 ENCODING 'SQL_ASCII'")
    log = Journal.open(postgres.url().replace("/postgres?", "/plain?"))
    log.append(lead(log), [record(A, 0)])
    assert [each.record.seq for each in log.read(A)] == [0]
    log.close()


@pytest.mark.sweep
def test_a_leader_that_could_not_renew_while_the_server_was_down_was_not_silent(
    log: Journal, url: str, postgres: Postgres
) -> None:
    lead(log, ELSEWHERE)
    postgres.sql("UPDATE lease SET renewed_s = renewed_s - 3600", url)
    postgres.stop()
    postgres.start()
    seen = log._database.persist(lambda _: look(log._database))
    assert seen.silent_s is not None
    assert 0 <= seen.silent_s < PATIENCE_S


def test_a_leader_that_is_frozen_inside_a_transaction_holds_nobody_up(
    log: Journal, url: str
) -> None:
    other, old = Journal.open(url), lead(log, ELSEWHERE)
    frozen = leading(log._database, old)
    with pytest.raises(UnavailableError, match="idle-in-transaction"), frozen as connection:  # noqa: PT012
        connection.exec_driver_sql(f"SET LOCAL {IDLE} = '{QUICK_S}s'")
        new = other.take_lead(US, ttl_s=0.01)  # while the other's lock is held
        connection.exec_driver_sql("SELECT 1")
    with pytest.raises(FencedError):
        log.append(old, [record(A, 0)])
    other.append(new.term, [record(A, 0)])
    other.close()


def test_tables_are_made_again_when_the_server_has_lost_patience(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may stand still inside the transaction that makes them."""
    make, num_begun = schema._make, 0

    def slowly(connection: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            threading.Event().wait(2 * QUICK_S)
        make(connection)

    monkeypatch.undo()
    monkeypatch.setattr(database, "_SESSION", session(QUICK_S))
    monkeypatch.setattr(schema, "_make", slowly)
    log = Journal.open(url)
    assert num_begun > 1
    assert lead(log) == 1
    log.close()


def test_two_that_open_a_new_journal_at_once_make_it_once(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        journals = list(pool.map(Journal.open, [url] * 4))
    assert lead(journals[0]) == 1
    for each in journals:
        each.close()


# ---- a database that goes away ----


@pytest.mark.sweep
def test_the_server_may_crash_and_come_back_under_a_journal(
    log: Journal, url: str, postgres: Postgres
) -> None:
    term = lead(log)
    log.append(term, [record(A, 0)])
    postgres.stop()
    starting = threading.Timer(0.3, postgres.start)
    starting.start()
    assert log.append(term, [record(A, 1), record(A, 2)])
    starting.join()
    postgres.stop()
    postgres.start()
    assert [each.record.seq for each in log.read(A)] == [0, 1, 2]
    log.renew(term)


@pytest.mark.sweep
def test_a_server_that_does_not_come_back_is_an_error(
    url: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.coordinator.store.database._POSTGRES_PATIENCE_S", 0.2)
    log = Journal.open(url)
    term = lead(log)
    postgres.stop()
    try:
        with pytest.raises(UnavailableError, match="cannot be used now"):
            log.append(term, [record(A, 0)])
        with pytest.raises(UnavailableError, match="cannot be used now"):
            Journal.open(url)
    finally:
        postgres.start()
    log.append(term, [record(A, 0)])
    log.close()


class Cutter:
    """Stands between a journal and its server, and cuts one connection at a COMMIT."""

    def __init__(self, folder: Path, server: Path) -> None:
        self.url = f"postgresql://stratagem@/postgres?host={folder}"
        self.armed = ""
        """'before' or 'after' the server has got the COMMIT."""
        self._server = str(server / SOCKET)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            threading.Thread(target=self._up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(client, server), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):  # the other thread closes both when the server goes
            while data := client.recv(65536):
                if self.armed and b"COMMIT\0" in data:
                    armed, self.armed = self.armed, ""
                    if armed == "after":
                        client.shutdown(socket.SHUT_RDWR)  # nobody will hear the answer
                        server.sendall(data)
                    break
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_append_whose_answer_is_lost_is_neither_lost_nor_doubled(
    url: str, tmp_path: Path, postgres: Postgres, when: str
) -> None:
    schema = url.partition("&")[2]
    with closing(Cutter(tmp_path, postgres.folder)) as between:
        log = Journal.open(f"{between.url}&{schema}")
        term = lead(log)
        log.append(term, [record(A, 0)])
        between.armed = when
        positions = log.append(term, [record(A, 1, "key"), record(A, 2)])
        assert not between.armed
        stored = list(log.read(A))
        assert [each.record.seq for each in stored] == [0, 1, 2]
        assert [each.position for each in stored[1:]] == positions
        between.armed = when
        log.delete_run(term, A)
        assert not list(log.read(A))
        log.release(term)
        between.armed = when
        assert log.take_lead(US, ttl_s=0.1).term == term + 1
        assert not between.armed
        log.close()


# ---- how it is opened ----


def shown(log: Journal, name: str) -> Any:
    def show(_is_repeat: bool) -> Any:
        with log._database.write() as connection:
            return connection.exec_driver_sql(f"SHOW {name}").scalar()

    return log._database.persist(show)


def test_a_commit_is_durable_whatever_the_default_of_the_server_is(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wanted, got in (("off", "on"), ("remote_apply", "remote_apply")):
        log = Journal.open(f"{url}%20-csynchronous_commit%3D{wanted}")
        assert shown(log, "synchronous_commit") == got
        log.close()
    monkeypatch.undo()
    with closing(Journal.open(url)) as log:
        assert shown(log, IDLE) == "3s", "who is idle in a transaction is not waited for"


def test_the_password_comes_from_a_file_that_may_change(
    tmp_path: Path, postgres: Postgres, url: str
) -> None:
    file = tmp_path / "password"
    guarded = url.replace("stratagem@", f"{GUARDED}@")
    file.write_text("wrong\n")
    with pytest.raises(UnavailableError, match="password authentication failed") as refused:
        Journal.open(guarded, password_file=file)
    assert "wrong" not in str(refused.value)
    file.write_text("open sesame\n")
    log = Journal.open(guarded, password_file=file)
    lead(log)
    log.close()
    with pytest.raises(InvalidInputError, match="absent cannot be read"):
        Journal.open(guarded, password_file=tmp_path / "absent")


def test_other_places_are_refused_without_repeating_them() -> None:
    for place, reason in (
        ("postgresql://me:secret@host/db", "use journal_password_file, or PGPASSFILE"),
        ("postgresql://me@host/db?password=secret", "use journal_password_file, or PGPASSFILE"),
        ("postgresql://me@host:secret/db", "is not postgresql://"),
        ("mysql://secret@host/db", "mysql:// is neither postgresql:// nor the path"),
    ):
        with pytest.raises(StratagemError, match=reason) as refused:
            Journal.open(place)
        assert "secret" not in str(refused.value)
