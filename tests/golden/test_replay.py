"""Journals of earlier versions replay to what they were, over both databases."""

import json
from pathlib import Path

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId
from stratagem.common.numerics.rules import FIRST
from stratagem.coordinator.core.commands import SubmitRun
from stratagem.coordinator.core.decide import decide
from stratagem.coordinator.core.fact_text import SCHEMA_VERSION, decode, encode, payload_now
from stratagem.coordinator.core.facts import KINDS, RunSubmitted
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, job_text
from tests.coordinator.store.journals import events
from tests.golden.replay import FOLDER, load, replay, summary_of
from tests.postgres import Postgres

JOURNALS = sorted(FOLDER.glob("*.sql"))
AMONG = {
    "federation": {
        *("ClientsJoined", "ClientLeft", "ClientBenched", "ClientStateLost", "RoundAccounted"),
        *("UpdatesJudged", "KeysPosted", "SharesRouted", "RoundRestarted"),
        *("UploadDue", "CommitUploaded", "SoleCopiesLost"),
    },
    "merged": {"MetricsMerged"},
}
"""What must be among that which replays."""


@pytest.mark.parametrize("sql", JOURNALS, ids=[each.stem for each in JOURNALS])
async def test_a_journal_of_another_version_has_the_same_runs(sql: Path, tmp_path: Path) -> None:
    """The first time from the facts, and then from the summaries that were made of them. The facts
    are read in either of two ways, and shown as this version writes them."""
    path, expected = tmp_path / "journal.sqlite", sql.with_suffix(".json").read_text()
    journal = load(sql, path)
    kinds = set()
    for stored in events(journal):
        kind, payload = stored.record.kind, stored.record.payload
        kinds.add(kind)
        fact = decode(kind, stored.record.schema_version, payload)
        known = KINDS[kind].model_validate(json.loads(payload))
        assert repr(fact) == repr(known)  # in which a loss that is not told is one, too
        assert json.loads(payload_now(kind, fact, payload)) == json.loads(encode(fact)[1])
    assert kinds >= AMONG.get(sql.stem, set())
    assert summary_of(await replay(journal)) == expected
    assert summary_of(await replay(Journal.open(path))) == expected


async def test_an_old_population_says_what_its_commits_were_trained_with(tmp_path: Path) -> None:
    """Which stands in the facts, though summaries of that time do not say it. And runs of before
    there were numbers of rules go on by the first ones."""
    found = await replay(load(JOURNALS[0], tmp_path / "journal.sqlite"))
    assert {run.numerics for run in found.state.runs.values()} == {FIRST}
    (run,) = [each for each in found.runs if each.strategy.startswith("PopulationBased")]
    assert run.commits
    for commit in run.commits:
        assert commit.member is not None
        assert commit.schedule[0].from_step == 0
        assert commit.schedule[-1].values.keys() == {"optimizer.lr"}


async def test_events_in_another_database_replay_alike(tmp_path: Path, postgres: Postgres) -> None:
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
