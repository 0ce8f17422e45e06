"""A coordinator with a federated run that has an update in the spool."""

import asyncio
from pathlib import Path

from stratagem.common.base.ids import new_submission
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import CancelRun, DeleteRun, SubmitRun
from stratagem.coordinator.core.facts import ROOT
from stratagem.coordinator.updates.spool import SpoolKey
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN
from tests.coordinator.open_gate import leading
from tests.coordinator.updates.updates import MIXED, data_of, manifest_of


async def submit(app: App) -> SpoolKey:
    """Submit the run; where the update of its first client in the first round lies."""
    command = SubmitRun(RUN, job_text(FEDERATED), 1.0, submission=new_submission())
    assert await app.loop.submit(command)
    return app.env.runs.spool_key(RUN, ROOT, 1, 0)


async def begin_and_delete(folder: Path) -> None:
    async with leading(folder) as app:
        key = await submit(app)
        manifest = manifest_of(MIXED)
        writer = app.spool.open(key, manifest)
        writer.write(data_of(manifest, 1))
        writer.commit(manifest, 1)
        assert app.spool.look(key)[0] is not None
        await app.loop.submit(CancelRun(RUN))
        app.logs.delete = lambda run_id: None  # type: ignore[method-assign]  # not done any more
        await app.loop.submit(DeleteRun(RUN))
        while app._chores._tasks:
            await asyncio.wait(app._chores._tasks)
