"""Sums of gradients through the coordinator, where a member ends a stream in the middle."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.rpc.channel import PLAINTEXT
from stratagem.common.tensors.manifest import Limits, Purpose, build_manifest, to_proto
from stratagem.common.tensors.stream import CHUNK_BYTES, fill_chunk
from stratagem.coordinator.core.effects import ExchangeMethod
from stratagem.coordinator.effects.context import EffectContext
from stratagem.coordinator.effects.parameter_server import serve_steps
from stratagem.coordinator.runtime.links import WorkerLink
from stratagem.coordinator.runtime.relay import RelayHub
from stratagem.v1 import worker_pb2, worker_pb2_grpc
from tests.common.rpc.rig import serving
from tests.coordinator.runtime.effects import segment
from tests.jobs import job

STEP = 10
GRADIENTS = np.arange(CHUNK_BYTES // 2, dtype=np.float32)
"""Two windows of the coordinator's."""


class Sole(worker_pb2_grpc.WorkerServiceServicer):
    """The one member of a party; the first of its streams of one kind ends early."""

    def __init__(self, ends_early: str) -> None:
        self.ends_early = ends_early
        self.refused = asyncio.Event()
        self.sums = bytearray()

    def _ends_now(self, stream: str) -> bool:
        ends = self.ends_early == stream
        self.ends_early = "" if ends else self.ends_early
        return ends

    async def GetGradients(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self._ends_now("gradients"):
            return
        manifest = build_manifest([("0/0:1", "float32", GRADIENTS.shape)], Purpose.GRADIENTS)
        header = worker_pb2.GradientHeader(step=STEP, manifest=to_proto(manifest))
        yield worker_pb2.GetGradientsResponse(header=header)
        data, must_wait = GRADIENTS.tobytes(), self.ends_early == "sums"
        for start in range(0, len(data), CHUNK_BYTES):
            if start and must_wait:
                await self.refused.wait()  # so that the rest is written into a call that has ended
            message = worker_pb2.GetGradientsResponse()
            fill_chunk(message.chunk, start, data[start : start + CHUNK_BYTES])
            yield message

    async def ApplyGradients(self, request_iterator: Any, context: Any) -> Any:
        header = await anext(aiter(request_iterator))
        assert header.header.step == STEP
        if self._ends_now("sums"):
            context.add_done_callback(lambda _: self.refused.set())
            raise UnavailableError("the party forms anew")
        self.sums.clear()
        async for message in request_iterator:
            self.sums += message.chunk.data
        return worker_pb2.ApplyGradientsResponse()


@pytest.mark.parametrize("ends_early", ["gradients", "sums", ""])
async def test_a_step_whose_stream_ends_is_asked_for_again(ends_early: str) -> None:
    effect = replace(segment("x", "a"), exchange=ExchangeMethod.PARAMETER_SERVER, to_step=STEP)
    sole = Sole(ends_early)
    async with serving(sole) as port:
        relay = RelayHub(lambda _: True)
        link = WorkerLink(effect.members[0], f"127.0.0.1:{port}", 1, PLAINTEXT, relay)
        env = SimpleNamespace(
            runs=SimpleNamespace(job_of=lambda run_id, party: job()),
            workers=SimpleNamespace(link=lambda member: link),
            transfers=SimpleNamespace(limits=Limits(max_total_bytes=1 << 30)),
        )
        await serve_steps(cast(EffectContext, env), effect, effect.members)
        await link.close()
    assert sole.ends_early == ""
    assert bytes(sole.sums) == GRADIENTS.tobytes()
