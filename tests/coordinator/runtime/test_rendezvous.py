"""The barriers at which the members of a party meet."""

import asyncio

import pytest

from stratagem.common.base.errors import StaleError
from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.runtime.rendezvous import Arrival, Barriers

RUN = RunId("run-1")
ROOT = Party("")


async def test_barrier_answers_everybody_in_order_of_rank() -> None:
    barriers = Barriers(lambda run, party: (3, 2))
    arrivals = [Arrival(b"zero", 5, "h:0"), Arrival(b"one", None, "h:1")]
    answers = await asyncio.gather(
        barriers.join(RUN, ROOT, 3, 1, arrivals[1]), barriers.join(RUN, ROOT, 3, 0, arrivals[0])
    )
    assert list(answers) == [tuple(arrivals), tuple(arrivals)]


async def test_barrier_of_another_membership_is_stale_also_while_waiting() -> None:
    current = [(3, 2)]
    barriers = Barriers(lambda run, party: current[0])
    with pytest.raises(StaleError, match="membership 2 is not the current one"):
        await barriers.join(RUN, ROOT, 2, 0, Arrival(b"", 0, ""))
    waiting = asyncio.create_task(barriers.join(RUN, ROOT, 3, 0, Arrival(b"", 0, "")))
    await asyncio.sleep(0)
    assert barriers.missing(RUN, ROOT, 3) == (1,)
    current[0] = (4, 1)
    barriers.drop_stale()
    with pytest.raises(StaleError):
        await waiting


async def test_member_that_calls_again_is_counted_once() -> None:
    barriers = Barriers(lambda run, party: (1, 2))
    lost = asyncio.create_task(barriers.join(RUN, ROOT, 1, 0, Arrival(b"old", 0, "")))
    await asyncio.sleep(0)
    lost.cancel()
    again = asyncio.create_task(barriers.join(RUN, ROOT, 1, 0, Arrival(b"new", 0, "")))
    await asyncio.sleep(0)
    answer = await barriers.join(RUN, ROOT, 1, 1, Arrival(b"one", 0, ""))
    assert [a.endpoint for a in answer] == [b"new", b"one"]
    assert await again == answer
