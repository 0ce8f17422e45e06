"""Sends this worker's heartbeats over one standing call, as often as the coordinator asks for.

Each beat is answered; what the coordinator says unasked comes in between. Owns one call, from its
first message to its end. What follows from the end is the caller's.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from stratagem.common.rpc.channel import write_message
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:  # the stubs' asynchronous side exists for type checkers only
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

LEAST_TIMEOUT_S: Final = 1.0
"""An answer is waited for as long as an interval, but for this long at least."""

_jitter: Final = random.Random()  # the numbers of the shared one belong to the user's code


def spread_s(interval_s: float) -> float:
    """Return a time within an interval: those who were cut off together do not come back, or beat,
    all at once."""
    return _jitter.uniform(0.0, interval_s)


@dataclass(slots=True)
class BeatStream:
    """One standing call, over which beats are sent until it ends."""

    first: pb.HeartbeatStreamRequest
    """Names the worker."""
    interval_s: float
    """How often to beat; what the coordinator has said last."""
    beat_now: asyncio.Event
    """Set by whoever wants the next beat at once."""
    drain_said: asyncio.Event
    """Set once a beat that says so was answered, or was the last one of the call."""
    is_draining: Callable[[], bool]
    is_over: Callable[[], bool]
    """Whether to beat no more."""
    on_answer: Callable[[pb.HeartbeatStreamResponse, float | None], None]
    """Called with each answer, and when the beat was sent that it belongs to; None: it was said
    unasked."""
    num_answered: int = 0
    _num_sent: int = 0
    _says_drain: bool = False
    """Whether the beat that was sent last says it."""
    _sent_s: float = 0.0
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stub: "CoordinatorServiceAsyncStub") -> None:
        """Beat until the coordinator ends the call with OK, or is_over. Raises AioRpcError for
        another end, and TimeoutError where no answer comes."""
        call: Any = stub.HeartbeatStream()
        reading = asyncio.create_task(self._read(call))
        reading.add_done_callback(self._wake)
        try:
            await self._beat(call, reading)
        finally:
            reading.remove_done_callback(self._wake)  # nobody wishes for a beat
            self._note_drain()
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _wake(self, _reading: "asyncio.Task[None]") -> None:
        self._answered.set()
        self.beat_now.set()

    async def _read(self, call: Any) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            is_of_beat = answer.num_beats == self._num_sent > self.num_answered
            self.interval_s = answer.interval_s or self.interval_s
            self.on_answer(answer, self._sent_s if is_of_beat else None)
            if is_of_beat:
                self.num_answered = answer.num_beats
                self._note_drain()
                self._answered.set()

    def _note_drain(self) -> None:
        if self._says_drain:
            self.drain_said.set()

    async def _beat(self, call: Any, reading: "asyncio.Task[None]") -> None:
        while not self.is_over():
            self.beat_now.clear()  # a wish that comes during the beat is for the next one
            self._answered.clear()
            if reading.done():
                reading.result()
                return
            beat = pb.HeartbeatStreamRequest(draining=self.is_draining())
            if not self._num_sent:
                beat.MergeFrom(self.first)
            self._says_drain = beat.draining
            async with asyncio.timeout(max(self.interval_s, LEAST_TIMEOUT_S)):
                await call.wait_for_connection()
                self._num_sent, self._sent_s = self._num_sent + 1, time.time()
                await write_message(call, beat)
                await self._answered.wait()
            # Those that began together go on at different times.
            is_first = self._num_sent == 1
            await self._pause(spread_s(self.interval_s) if is_first else self.interval_s)

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self.beat_now.wait()
        except TimeoutError:
            return
