"""A journal's copy has one moment of it, and is restored into either database."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.common.base.errors import ConflictError, IntegrityError
from stratagem.common.base.ids import RunId
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
from stratagem.coordinator.store.snapshot import TERMS_AHEAD, Known
from tests.coordinator.store.journals import OVER_BOTH, A, B, events, lead, record


@pytest.mark.parametrize("target", OVER_BOTH)
def test_what_is_restored_is_one_moment_and_goes_on(
    place: str, target: str, journal_place: Callable[[str], str], tmp_path: Path
) -> None:
    journal = Journal.open(place)
    term = lead(journal)
    known = journal.identity(term)
    journal.append(term, [record(A, number) for number in range(2100)])  # more than a batch
    journal.append(term, [record(B, 0), record(RunId(""), 0)])
    journal.delete_run(term, B)  # positions have a gap
    moment = journal.snapshot()
    before = list(events(journal))
    journal.append(term, [record(B, 0)])
    file = tmp_path / "copy.sqlite"
    moment.write(file)
    moment.close()
    journal.close()
    assert file.stat().st_mode & 0o777 == 0o600
    assert Known.of(file) == Known(term, known)
    other = str(tmp_path / "other.db") if target == "sqlite" else journal_place(target)
    assert Journal.restore(file, other) == term + TERMS_AHEAD
    with pytest.raises(ConflictError, match="events already; nothing was written"):
        Journal.restore(file, other)
    restored = Journal.open(other)
    assert list(events(restored)) == before
    now = restored.take_lead(Holder.of_this_process(), ttl_s=1)
    assert now.term == term + TERMS_AHEAD + 1
    assert restored.identity(now.term) == known
    (position,) = restored.append(now.term, [record(B, 0)])
    assert position > before[-1].position
    restored.close()


def test_another_file_or_a_damaged_one_is_no_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.sqlite")
    journal.append(
        lead(journal), [replace(record(A, n), payload='"' + "x" * 5000 + '"') for n in range(20)]
    )
    moment = journal.snapshot()
    moment.write(file := tmp_path / "copy.sqlite")
    moment.close()
    journal.close()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match="damaged"):
        Known.of(file)
    file.write_bytes(b"text" * 1000)
    with pytest.raises(IntegrityError, match="no journal"):
        Known.of(file)
