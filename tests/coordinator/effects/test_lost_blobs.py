"""A blob that a worker had to drop comes again, whatever order the messages about it take."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import Digest, Incarnation, RunId, WorkerId
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects import context
from stratagem.coordinator.effects.context import EffectContext
from stratagem.coordinator.effects.execute import attend
from stratagem.v1 import worker_pb2
from tests.coordinator.core.jobs import LOCAL, job_text

BASE, RUN = Digest("1" * 64), RunId("r-1")
MEMBER = Member(worker_id=WorkerId("w0"), incarnation=Incarnation("one"))


async def settled() -> None:
    """Let whoever can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Transfers:
    """The transfers of a coordinator; one takes until `end`."""

    def __init__(self) -> None:
        self.pushes: dict[tuple[Member, RunId, Digest], Any] = {}
        self.num_begun = 0
        self.changed = asyncio.Event()
        self._ended = asyncio.Event()
        self.needs: list[bool] = []

    async def push(self, member: Member, run_id: RunId, digest: Digest) -> None:
        """Share the transfer that is under way."""
        key = (member, run_id, digest)
        if key not in self.pushes:
            self.num_begun += 1
            self.pushes[key] = self._ended
        self.changed.set()
        await self.pushes[key].wait()

    def end(self) -> None:
        """End the transfer that is under way."""
        self.pushes.clear()
        self._ended.set()
        self._ended = asyncio.Event()
        self.changed.clear()

    async def plan(self, _request: Any) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """Ask as often as there are needs, and end with the last transfer."""
        for was_here in self.needs:
            need = worker_pb2.NeedBlob(digest=BASE, was_here=was_here)
            yield worker_pb2.ExecuteResponse(need_blob=need)
        await settled()
        while self.changed.is_set():
            self.end()
            await settled()
        yield worker_pb2.ExecuteResponse(result=worker_pb2.ExecuteResult())


@pytest.mark.parametrize(
    ("is_under_way", "needs", "num_begun"),
    [
        (False, [False], 1),
        (False, [True], 1),
        (True, [False], 1),  # it comes after the worker has asked
        (True, [True], 2),  # it may have ended there before
        (False, [False, True], 2),
        (False, [True, True, True], 2),
        (False, [False, False], 1),
    ],
)
async def test_a_transfer_that_may_have_ended_before_a_request_does_not_answer_it(
    is_under_way: bool, needs: list[bool], num_begun: int
) -> None:
    transfers = Transfers()
    ahead = None
    if is_under_way:
        ahead = asyncio.create_task(transfers.push(MEMBER, RUN, BASE))
        await asyncio.sleep(0)
    transfers.needs = needs
    request = worker_pb2.ExecuteRequest(job_json=job_text(LOCAL))
    request.session.run_id = RUN
    request.train.base.digest = BASE
    workers = SimpleNamespace(link=lambda _member: SimpleNamespace(execute=transfers.plan))
    env = SimpleNamespace(runs=None, workers=workers, transfers=transfers)
    await attend(cast(EffectContext, env), MEMBER, request)
    assert transfers.num_begun == num_begun
    if ahead is not None:
        await ahead


async def test_who_waits_for_a_transfer_that_is_stopped_is_told_and_is_not_cancelled_itself() -> (
    None
):
    """A group of tasks says nothing of one that is cancelled: the plan would wait for ever."""
    transfer = asyncio.ensure_future(asyncio.Event().wait())
    fake = cast(context.Transfers, SimpleNamespace(start_push=lambda *_: transfer))
    push = context.Transfers.push
    asking, gone = (asyncio.ensure_future(push(fake, MEMBER, RUN, BASE)) for _ in "ab")
    await settled()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    transfer.cancel()
    with pytest.raises(UnavailableError, match="to worker w0 was stopped"):
        await asking
