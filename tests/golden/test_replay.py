"""Journals of earlier versions replay to what they were, over both databases."""

from pathlib import Path

import pytest

from stratagem.coordinator.journal import Holder, Journal, Record
from tests.golden.replay import FOLDER, load, replay, summary_of
from tests.postgres import Postgres

JOURNALS = sorted(FOLDER.glob("*.sql"))


@pytest.mark.parametrize("sql", JOURNALS, ids=[each.stem for each in JOURNALS])
async def test_a_journal_of_an_earlier_version_replays_to_the_same_runs(
    sql: Path, tmp_path: Path
) -> None:
    state = await replay(load(sql, tmp_path / "journal.sqlite"))
    assert summary_of(state) == sql.with_suffix(".json").read_text()


async def test_events_that_move_to_another_database_replay_to_the_same_runs(
    tmp_path: Path, postgres: Postgres
) -> None:
    sql = JOURNALS[-1]
    old, new = load(sql, tmp_path / "journal.sqlite"), Journal.open(postgres.new_schema())
    lead = new.take_lead(Holder.of_this_process(), ttl_s=1)
    records: list[Record] = [each.record for each in old.replay()]
    for start in range(0, len(records), 100):
        new.append(lead.term, records[start : start + 100])
    new.release(lead.term)
    old.close()
    assert summary_of(await replay(new)) == sql.with_suffix(".json").read_text()
