"""Journals of earlier versions replay to what they were, over both databases."""

import json
from pathlib import Path

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId
from stratagem.common.numerics.numerics_rules import FIRST
from stratagem.coordinator.core.commands import SubmitRun
from stratagem.coordinator.core.facts import KINDS, RunSubmitted
from stratagem.coordinator.core.facts.fact_serialization import (
    SCHEMA_VERSION,
    decode,
    encode,
    payload_now,
)
from stratagem.coordinator.core.state_machine.decide import decide
from stratagem.coordinator.store.journal.journal import Journal, Record
from stratagem.coordinator.store.journal.lead_holder import Holder
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, job_text
from tests.coordinator.store.journals import events
from tests.golden.replay import FOLDER, load, replay, summary_of
from tests.postgres import Postgres

JOURNALS = sorted(FOLDER.glob("*.sql"))


@pytest.mark.parametrize("sql", JOURNALS, ids=[each.stem for each in JOURNALS])
async def test_a_journal_of_an_earlier_version_replays_to_the_same_runs(
    sql: Path, tmp_path: Path
) -> None:
    """The first time from the facts, and then from the summaries that were made of them."""
    path, expected = tmp_path / "journal.sqlite", sql.with_suffix(".json").read_text()
    assert summary_of(await replay(load(sql, path))) == expected
    assert summary_of(await replay(Journal.open(path))) == expected


@pytest.mark.parametrize("sql", JOURNALS, ids=[each.stem for each in JOURNALS])
def test_facts_of_an_earlier_version_are_read_and_shown_as_this_one_writes_them(
    sql: Path, tmp_path: Path
) -> None:
    """In whichever of two ways they are read."""
    journal = load(sql, tmp_path / "journal.sqlite")
    for stored in events(journal):
        kind, payload = stored.record.kind, stored.record.payload
        fact = decode(kind, stored.record.schema_version, payload)
        known = KINDS[kind].model_validate(json.loads(payload))
        assert repr(fact) == repr(known)  # in which a loss that is not told is one, too
        assert json.loads(payload_now(kind, fact, payload)) == json.loads(encode(fact)[1])
    journal.close()


OF_FEDERATIONS = {
    *("ClientsJoined", "ClientLeft", "ClientBenched", "ClientStateLost", "RoundAccounted"),
    *("UpdatesJudged", "KeysPosted", "SharesRouted", "RoundRestarted"),
    *("UploadDue", "CommitUploaded", "SoleCopiesLost"),
}


def test_what_happens_to_federations_and_replicas_is_among_what_replays(tmp_path: Path) -> None:
    journal = load(FOLDER / "federation.sql", tmp_path / "journal.sqlite")
    assert {stored.record.kind for stored in events(journal)} >= OF_FEDERATIONS
    journal.close()


def test_metrics_that_were_merged_are_among_what_replays(tmp_path: Path) -> None:
    journal = load(FOLDER / "merged.sql", tmp_path / "journal.sqlite")
    assert "MetricsMerged" in {stored.record.kind for stored in events(journal)}
    journal.close()


async def test_an_old_population_says_what_its_commits_were_trained_with(tmp_path: Path) -> None:
    """Which stands in the facts, though summaries of that time do not say it."""
    found = await replay(load(JOURNALS[0], tmp_path / "journal.sqlite"))
    (run,) = [each for each in found.runs if each.strategy.startswith("PopulationBased")]
    assert run.commits
    for commit in run.commits:
        assert commit.member is not None
        assert commit.schedule[0].from_step == 0
        assert commit.schedule[-1].values.keys() == {"optimizer.lr"}


async def test_events_that_move_to_another_database_replay_to_the_same_runs(
    tmp_path: Path, postgres: Postgres
) -> None:
    sql = JOURNALS[-1]
    old, new = load(sql, tmp_path / "journal.sqlite"), Journal.open(postgres.new_schema())
    lead = new.take_lead(Holder.of_this_process(), ttl_s=1)
    records: list[Record] = [each.record for each in events(old)]
    for start in range(0, len(records), 100):
        new.append(lead.term, records[start : start + 100])
    new.release(lead.term)
    old.close()
    assert summary_of(await replay(new)) == sql.with_suffix(".json").read_text()


POPULATION = {
    "type": "PopulationBased",
    "generations": 2,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Perturbation", "factor": 0.2},
}
BEYOND: dict[str, str] = {
    "replicas": job_text({**DATA_PARALLEL, "num_replicas": 16_385}),
    "clients": job_text({**FEDERATED, "num_clients": 1_000_001}),
    "members": job_text(
        {**POPULATION, "population_size": 10_001},
        search_space={"optimizer.lr": {"low": 0.1, "high": 1.0}},
        steps_per_generation=5,
        evaluation={"metrics": ["accuracy"], "best": "accuracy"},
    ),
    "metrics": job_text(
        LOCAL, evaluation={"split": "test", "metrics": [f"m:metric_{n}" for n in range(65)]}
    ),
    "values": job_text(LOCAL, data={"entrypoint": "m:d", "kwargs": {"rows": [0] * 2**16}}),
}


@pytest.mark.parametrize("what", BEYOND)
async def test_what_was_accepted_before_there_was_a_limit_replays_and_is_refused_anew(
    what: str, tmp_path: Path
) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal.open(path)
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
    kind, payload = encode(RunSubmitted(job_json=BEYOND[what], wall_s=1.0))
    journal.append(
        lead.term,
        [Record(RunId("old"), 0, kind, SCHEMA_VERSION, payload, time_s=1.0, wall_s=1.0)],
    )
    journal.release(lead.term)
    state = (await replay(journal)).state
    assert state.runs[RunId("old")].ended is None
    with pytest.raises(InvalidInputError):  # also right after the old one has been read
        decide(state, SubmitRun(RunId("new"), BEYOND[what], 2.0))


async def test_runs_of_before_there_were_numbers_go_on_by_the_first_rules(tmp_path: Path) -> None:
    runs = (await replay(load(JOURNALS[0], tmp_path / "journal.sqlite"))).state.runs
    assert runs
    assert {run.numerics for run in runs.values()} == {FIRST}
