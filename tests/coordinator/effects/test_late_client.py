"""What becomes of a client whose update is made and not taken yet when its round closes."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.common.base.ids import Party
from stratagem.coordinator.effects import train_client
from tests.coordinator.core.simulation import RUN, member

EFFECT: Any = SimpleNamespace(
    run_id=RUN, party=Party(""), client=3, round_num=1, attempt=0, membership=1, member=member("a")
)


@pytest.mark.parametrize("is_due", [False, True])
async def test_the_worker_ends_what_it_offers_unless_only_this_process_ends(is_due: bool) -> None:
    chores: list[str] = []

    def do(chore: Coroutine[Any, Any, None], what: str) -> None:
        chore.close()
        chores.append(what)

    runs = SimpleNamespace(
        is_due=lambda _: is_due, state=SimpleNamespace(runs={}), chores=SimpleNamespace(do=do)
    )
    transfers = SimpleNamespace(pulls=asyncio.Semaphore(0))
    env: Any = SimpleNamespace(runs=runs, workers=None, transfers=transfers)
    nothing: Any = None
    collecting = asyncio.create_task(train_client._collect(env, EFFECT, nothing, nothing, nothing))
    await asyncio.sleep(0)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert chores == ([] if is_due else ["abort the training of a client"])
