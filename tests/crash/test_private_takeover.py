"""A journal in PostgreSQL, and coordinators that are given the secret of private runs."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import StratagemError
from stratagem.common.privacy import accountant
from stratagem.common.process.failpoints import DIRECTORY_VARIABLE
from tests.crash.failure_logs import LOGS
from tests.crash.hands import free_address, hands
from tests.crash.jobs import JOBS, PRIVACY, Job
from tests.crash.rig import KILLED_BY_FAILPOINT, await_event, outcome_of
from tests.patience import PATIENCE_S
from tests.postgres import Postgres

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("Who takes over makes the noise of the leader before."),
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]

SECRET: Job = {**JOBS["Private"], "privacy": {**PRIVACY, "noise": "secret"}}
SETTING = "STRATAGEM_COORDINATOR_PRIVACY_SECRET"


def secret_in(file: Path) -> str:
    file.write_bytes(os.urandom(32))
    file.chmod(0o600)
    return str(file)


def test_who_takes_over_goes_on_with_the_noise_of_the_run_or_not_at_all(
    postgres: Postgres, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The first leader is killed when it has folded the second round; the second one folds it
    again. A third one has another secret."""
    ours, others = secret_in(tmp_path / "ours"), secret_in(tmp_path / "others")
    failpoints = tmp_path / "failpoints"
    failpoints.mkdir()
    (failpoints / "coordinator.round.folded").write_text("1")
    environments: Mapping[str, Mapping[str, str]] = {
        "a": {SETTING: ours, DIRECTORY_VARIABLE: str(failpoints)},
        "b": {SETTING: ours},
        "c": {SETTING: others},
        "d": {SETTING: ours},
    }
    addresses = {name: free_address() for name in environments}
    flags = ("--journal", postgres.new_schema(), "--worker-ttl-s", "5", "--lease-ttl-s", "2")
    with hands(tmp_path, *flags) as started, Client(",".join(addresses.values())) as client:
        started.environment_of = lambda name: environments.get(name, {})
        request.node.stash[LOGS] = started.logs
        first = started.coordinator("a", addresses["a"])
        assert first.address == addresses["a"]
        workers = [started.worker(f"w{n}", ",".join(addresses.values())) for n in range(2)]
        assert all(worker.address for worker in workers)
        run = client.submit(SECRET)
        assert first.popen.wait(PATIENCE_S) == KILLED_BY_FAILPOINT
        # Not before: it would take over from one that stood still for as long as the lease.
        second = started.coordinator("b", addresses["b"])
        assert second.address == addresses["b"]
        with Client(addresses["b"]) as other:
            outcome = outcome_of(other.get(run.run_id))
            again = other.submit({**SECRET, "strategy": {**SECRET["strategy"], "rounds": 400}})
            await_event(again, "SegmentCommitted")
        stored = {p.name for p in (tmp_path / "data" / "blobs").rglob("*") if p.is_file()}
        made = {name.partition(".")[0] for name in stored}
        assert {outcome.digests["", number] for number in (1, 2, 3)} <= made
        second.kill()
        third = started.coordinator("c", addresses["c"])
        assert third.address == addresses["c"]
        with (
            Client(addresses["c"]) as other,
            pytest.raises(StratagemError, match="the privacy secret is another one than the run's"),
        ):
            other.get(again.run_id).result()
        third.kill()
        fourth = started.coordinator("d", addresses["d"])
        assert fourth.address == addresses["d"]
        with Client(addresses["d"]) as other:
            resumed = other.get(again.run_id)
            resumed.resume()
            await_event(resumed, "SegmentCommitted")
            resumed.cancel()
