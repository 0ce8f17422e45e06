"""The leader sums up the facts of the cluster by itself, and a takeover reads no others."""

import asyncio
from pathlib import Path

import pytest

from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import LoseWorker, SubmitRun
from stratagem.coordinator.runtime import loop
from stratagem.coordinator.store.journal import Journal
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.core.simulation import RUN, member, register
from tests.coordinator.open_gate import decides, leading

pytestmark = pytest.mark.usefixtures("timeless")


async def come_and_go(app: App, num_turns: int) -> None:
    for turn in range(num_turns):
        await app.loop.submit(register("b", turn))
        await app.loop.submit(LoseWorker(member("b", turn), "silent"))


def cluster(folder: Path) -> list[str]:
    journal = Journal.open(folder / "journal.sqlite")
    kinds = [each.record.kind for each in journal.read(CLUSTER)]
    journal.close()
    return kinds


async def test_the_leader_sums_up_while_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SUMMED_UP_CLUSTER", 10)
    async with leading(tmp_path, decides) as app:
        await app.loop.submit(register("a", 0))
        await app.loop.submit(SubmitRun(RUN, job_text(LOCAL), 1.0))
        await come_and_go(app, 5)
        await asyncio.gather(*app._chores._tasks)
        await come_and_go(app, 1)
        state = app.loop.state
    kinds = cluster(tmp_path)
    assert kinds[0] == "ClusterSummed"
    assert len(kinds) < 13, "what is summed up is deleted"
    async with leading(tmp_path, decides) as app:
        assert app.loop.state.workers == state.workers
        assert app.loop.state.runs == state.runs
        await app.loop.submit(register("c", 0))  # its number is the next one
    assert cluster(tmp_path)[-1] == "WorkerRegistered"


async def test_a_takeover_sums_up_as_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(tmp_path, decides) as app:
        await app.loop.submit(register("a", 0))
        await come_and_go(app, 12)
        workers = app.loop.state.workers
    assert len(cluster(tmp_path)) == 25
    monkeypatch.setattr(loop, "SUMMED_UP_CLUSTER", 10)
    async with leading(tmp_path, decides) as app:
        assert app.loop.state.workers == workers
        assert cluster(tmp_path) == ["ClusterSummed"]
    async with leading(tmp_path, decides) as app:
        assert app.loop.state.workers == workers
