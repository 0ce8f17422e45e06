"""Sites that take part at certain hours: outside of them, and when these end within a round."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import Outcome, cluster_of, federated, outcome_of, train
from tests.crash.rig import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a site takes part in its hours alone"),
]

CLOCKED_WORKER = Path(__file__).with_name("clocked_worker.py")
FILE = """
site = "site-{number}"
[data.ward]
entrypoint = "tests.userland.data:classes"
kwargs = {{num_rows = {num_rows}}}
[[accept]]
data = ["ward"]
entrypoints = ["tests.userland.*:*"]
{windows}
"""
NIGHTS = 'windows = ["Mon-Fri 19:00-06:00"]\ntimezone = "Europe/Vienna"'
NOON = "2026-11-23T12:00:00+01:00"  # a Monday
JUST_BEFORE_SEVEN = "2026-11-23T18:59:59+01:00"
EVENING = "2026-11-23T20:00:00+01:00"
JUST_BEFORE_SIX = "2026-11-24T05:59:59.8+01:00"
CLOSED = "site site-1 is closed: opens {} 19:00 Europe/Vienna"


@contextmanager
def sites(
    folder: Path, clock: Path, num_rows: int = 20, by_day: str = ""
) -> Iterator[tuple[LocalCluster, Client]]:
    """Two sites, of which the second one takes part at night; it has num_rows rows. by_day: the
    windows of the first one, which is always open unless they are given."""
    files = []
    for number, windows in enumerate((by_day, NIGHTS)):
        file = folder / f"site-{number}" / "site.toml"
        file.parent.mkdir()
        rows = num_rows if number else 20
        file.write_text(FILE.format(number=number, num_rows=rows, windows=windows))
        files.append(file)
    settings = {"allow": [], "allow_code": "none", "environment": {"TEST_CLOCK": str(clock)}}
    arguments = [["--site", str(file)] for file in files]
    with (
        cluster_of(folder, arguments, worker=CLOCKED_WORKER, **settings) as cluster,
        cluster.client() as client,
    ):
        yield cluster, client


def federation(client: Client) -> Outcome:
    spec = federated(num_clients=2, rounds=2, data={"worker_local": "ward"}, batch_size=1)
    return train(client, spec)


def closed_of(outcome: Outcome) -> set[tuple[int, int, str, str]]:
    return {
        (e.payload["round_num"], e.payload["client"], e.payload["cause"], e.payload["reason"])
        for e in outcome.of("UpdateRejected")
    }


def test_a_site_takes_part_in_its_windows_alone(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text(NOON)
    with sites(tmp_path, clock) as (_, client):
        by_day = federation(client)
        clock.write_text(EVENING)
        by_night = federation(client)
    reason = CLOSED.format("Mon")
    assert closed_of(by_day) == {(n, 1, "outside_window", reason) for n in (1, 2)}
    assert len(by_day.of("UpdateReceived")) == 2
    assert closed_of(by_night) == set()
    assert len(by_night.of("UpdateReceived")) == 4


def test_the_end_of_a_window_ends_a_round_and_no_process(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text(JUST_BEFORE_SIX)
    with sites(tmp_path, clock, num_rows=300_000) as (cluster, client):  # minutes of training
        outcome = federation(client)
        assert cluster.processes["worker-1"].num_starts == 1
    assert closed_of(outcome) == {(n, 1, "outside_window", CLOSED.format("Tue")) for n in (1, 2)}
    audit = (tmp_path / "site-1" / "audit.jsonl").read_text()
    assert '"kind":"round"' not in audit
    assert audit.count('"outcome":"error"') >= 2


def test_an_open_roster_asks_a_site_again_when_it_opens(tmp_path: Path) -> None:
    """It says itself when that is; who has not said it is asked after five minutes."""
    clock, num_rounds = tmp_path / "clock", 20
    clock.write_text(JUST_BEFORE_SEVEN)
    with sites(tmp_path, clock) as (_, client):
        options = {"roster": {"open": True, "min_clients": 2}}
        data = {"worker_local": "ward"}
        spec = federated(num_clients=2, rounds=num_rounds, data=data, options=options)
        run = client.submit(spec)
        until(
            lambda: f"2 sites; {CLOSED.format('Mon')} (client 1)" in run.status().reason,
            "a round waits for the site",
        )
        clock.write_text(EVENING)
        outcome = outcome_of(run)
    refusals = outcome.of("UpdateRejected")
    assert {(e.payload["client"], e.payload["opens_in_s"]) for e in refusals} == {(1, 1.0)}
    answered = [e.payload["round_num"] for e in outcome.of("UpdateReceived") if e.payload["client"]]
    without = [e.payload["round_num"] for e in refusals]
    assert sorted(without + answered) == [*range(1, num_rounds + 1)]
    assert answered
    assert max(without) < min(answered)
