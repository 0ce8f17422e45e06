"""A coordinator that forgets ended runs, and one that forgets nothing:
see test_archived_runs.py."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratagem.common.base.errors import StratagemError
from stratagem.common.base.ids import RunId
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core.commands import Command, Refusal
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.run_view import RunView, view_of
from stratagem.coordinator.core.state import CoordinatorState, RunRecord
from stratagem.coordinator.core.strategy_contract import MISSING, Strategies
from stratagem.coordinator.runtime.loop import Loop
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
from tests.coordinator.core.simulation import Simulation, register


class Twins:
    """A loop over a journal, and a simulation in which no run comes to rest; both are told the
    same, and have to answer the same."""

    def __init__(self, path: Path, strategies: Strategies) -> None:
        self.path = path
        self.simulation = Simulation(strategies)
        self.told: list[Command] = []
        self.loop: Loop
        self._running: asyncio.Task[None]

    async def open(self) -> None:
        journal = Journal.open(self.path)
        lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
        self.loop = Loop(journal, lead, self.simulation.strategies)
        await self.loop.replay(lambda facts: None)
        self._running = asyncio.create_task(self.loop.run(lambda facts: None))

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.loop.close()

    async def restart(self, strategies: Strategies | None = None) -> None:
        """Both forget what they have in memory; the loop with its facts of the cluster summed up.

        strategies: what both have from then on, unless those of before.
        """
        if strategies is not None:
            self.simulation.strategies = strategies
        await self.loop.sum_up_cluster()
        await self.close()
        self.simulation.crash(is_twin=strategies is None)
        await self.open()

    async def tell(self, command: Command) -> None:
        self.told.append(command)
        assert await _answer(self._submit(command)) == await _answer(self._simulate(command))

    async def work(self, steps: int = 10_000) -> None:
        """Let happen what is under way."""
        for _ in range(steps):
            if self.simulation.queue:
                await self.tell(self.simulation.queue.popleft())

    async def agree(self) -> None:
        """Every run is shown as if it had never been at rest, and the same blobs are kept."""
        state, expected = self.loop.state, self.simulation.state
        views = await self.loop.recorded.views(state.ended.keys())
        assert views.keys() == state.ended.keys()
        views |= {run_id: self._view(self.loop, run_id) for run_id in state.runs}
        assert views == {run_id: self._view(self.simulation, run_id) for run_id in expected.runs}
        assert _of_cluster(state) == _of_cluster(expected)
        assert live_blobs(state) == live_blobs(expected)
        assert pending(state) == pending(expected)
        assert not any(may_rest(run) for run in state.runs.values())
        assert self.loop._agenda._numbers.keys() == state.runs.keys(), "no others are thought of"
        for run_id, run in state.ended.items():
            record = expected.runs[run_id]
            assert (run.ended, run.num_facts) == (record.ended, record.num_facts)

    def _view(self, twin: Any, run_id: RunId) -> RunView:
        world = twin.world if isinstance(twin, Loop) else twin.agenda.world
        return view_of(world, twin.state.runs[run_id], 0.0)

    async def _submit(self, command: Command) -> Any:
        return await self.loop.submit(command)

    async def _simulate(self, command: Command) -> Any:
        decided = self.simulation.tell(command)
        if isinstance(decided, Refusal):
            raise StratagemError(decided.reason)
        return decided


def _of_cluster(state: CoordinatorState) -> tuple[object, ...]:
    """The part of a state that facts of the cluster make, without the times of its own clock."""
    workers = {
        name: replace(worker, lost_s=0.0, beat_s=0.0, registered_s=0.0)
        for name, worker in state.workers.items()
    }
    return workers, state.uploads, state.pinned, state.holds.keys()


def may_rest(run: RunRecord) -> bool:
    settled = not run.has_raised and run.strategy is not MISSING
    return run.ended is not None and run.is_released and settled


async def _answer(asked: Awaitable[Any]) -> Any:
    try:
        return await asked
    except StratagemError as error:
        return str(error)


@asynccontextmanager
async def twins(
    folder: Path, *workers: str, strategies: Strategies = BUILT_IN
) -> AsyncIterator[Twins]:
    made = Twins(folder / "journal.sqlite", strategies)
    await made.open()
    for name in workers:
        await made.tell(register(name))
    try:
        yield made
    finally:
        await made.close()
