"""A coordinator that a test leads by itself: nobody comes through its entrance."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stratagem.common.rpc.health_service import HealthService
from stratagem.coordinator.app.app import App
from stratagem.coordinator.runtime.leader_gate import LeaderGate
from tests.settings import coordinator_settings


def entrance() -> LeaderGate:
    return LeaderGate("127.0.0.1:1", HealthService())


def decides(app: App) -> Coroutine[Any, Any, None]:
    """What a coordinator does that has no chores of its own."""
    return app.loop.run(app._changed)


@asynccontextmanager
async def leading(
    folder: Path, runs: Callable[[App], Coroutine[Any, Any, None]] = App.run, **settings: Any
) -> AsyncIterator[App]:
    app = await App.lead(coordinator_settings(data_dir=folder, **settings), entrance())
    running = asyncio.create_task(runs(app))
    try:
        yield app
    finally:
        if runs is decides:
            await app._chores.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if runs is decides:
            await app.supervisor.close()
            app.logs.close()
        await app.loop.close()
