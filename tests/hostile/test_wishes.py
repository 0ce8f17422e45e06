"""A worker under somebody else's control asks for a blob that it may have, again and again."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import Digest, Incarnation, WorkerId
from stratagem.common.base.retry import Backoff
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects import execute as module
from stratagem.coordinator.effects.context import EffectContext
from stratagem.coordinator.effects.execute import attend
from stratagem.v1 import worker_pb2
from tests.coordinator.core.jobs import LOCAL, job_text

BASE = "1" * 64
REPEATED = 1000


def asks() -> worker_pb2.ExecuteResponse:
    return worker_pb2.ExecuteResponse(need_blob=worker_pb2.NeedBlob(digest=BASE))


async def test_a_wish_that_is_repeated_is_one_wish_and_the_job_is_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought: list[str] = []
    num_read = 0
    has_room, has_come = asyncio.Event(), asyncio.Event()

    async def push(_member: Member, _run_id: str, digest: Digest) -> None:
        brought.append(digest)
        await has_room.wait()
        has_come.set()  # who has waited goes on later than the caller of this

    async def execute(_request: Any) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        for _ in range(REPEATED):
            yield asks()
            await asyncio.sleep(0)
        assert brought == [BASE], "it takes none of the bytes, and asks for more"
        has_room.set()
        await has_come.wait()
        has_come.clear()
        yield asks()  # it may have lost the blob
        await has_come.wait()
        yield worker_pb2.ExecuteResponse(result=worker_pb2.ExecuteResult())

    def loads(text: str) -> Any:
        nonlocal num_read
        num_read += 1
        return json.loads(text)

    monkeypatch.setattr(module, "json", SimpleNamespace(loads=loads))
    link = SimpleNamespace(execute=execute)
    transfers = SimpleNamespace(push=push, pushes={})
    workers = SimpleNamespace(link=lambda _member: link)
    env = SimpleNamespace(runs=None, workers=workers, transfers=transfers)
    request = worker_pb2.ExecuteRequest(job_json=job_text(LOCAL))
    request.train.base.digest = BASE
    member = Member(worker_id=WorkerId("liar"), incarnation=Incarnation("liar"))
    await attend(cast(EffectContext, env), member, request)
    assert brought == [BASE, BASE]
    assert num_read == 1


async def test_a_worker_whose_streams_break_at_once_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the state that the plan needs finds no room: the effect is tried again then."""
    paused: list[None] = []

    async def pause(_backoff: object) -> None:
        paused.append(None)

    async def execute(_request: Any) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield worker_pb2.ExecuteResponse(accepted=worker_pb2.Accepted())
        raise UnavailableError("this worker cannot store what it is sent now: it is full")

    async def answers() -> bool:
        return True

    monkeypatch.setattr(Backoff, "pause", pause)
    link = SimpleNamespace(execute=execute, answers=answers)
    runs = SimpleNamespace(say=lambda *_, **_ids: None)
    env = SimpleNamespace(runs=runs, workers=SimpleNamespace(link=lambda _member: link))
    member = Member(worker_id=WorkerId("full"), incarnation=Incarnation("full"))
    with pytest.raises(UnavailableError, match="it is full"):
        await attend(cast(EffectContext, env), member, worker_pb2.ExecuteRequest())
    assert len(paused) == module.MAX_BROKEN - 1
