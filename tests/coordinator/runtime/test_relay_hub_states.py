"""The hub of tunnels against a model of it, over any order of what workers, dials and time do.

Its loop has a clock that stands still between the steps, so four minutes pass at once.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime import relay
from stratagem.coordinator.runtime.relay import DIAL_WAIT_S, PARKED_FOR_S, RelayHub

MEMBERS = [
    Member(worker_id=WorkerId(name), incarnation=Incarnation(start))
    for name, start in (("w", "one"), ("w", "two"), ("v", "one"))
]
MAX_PARKED, MAX_LIVE, MAX_STREAMS = 2, 3, 6
"""Small enough to be reached within few steps."""
HELLO = b"hello"
"""What each dial says first."""
TURNS = 40
"""Of the loop, after which nothing more follows from a step."""


class StillLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves only when it is told to."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Lot:
    """What the model knows of the streams of one start of a worker."""

    emptied_s: float
    parked: list["Stream"] = field(default_factory=list)
    waiting: deque["Dial"] = field(default_factory=deque)
    live: list["Stream"] = field(default_factory=list)
    had_streams: bool = False


@dataclass(eq=False)
class Stream:
    """A worker's end of a stream, and what the model expects of it."""

    lot: Lot
    since_s: float
    sent: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    came: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    call: asyncio.Task[None] | None = None
    dial: "Dial | None" = None
    is_greeted: bool = False
    is_over: bool = False
    error: type[Exception] | None = None


@dataclass(eq=False)
class Dial:
    lot: Lot
    """Where it was dialled; that may have been replaced since."""
    connection: socket.socket
    since_s: float
    has_hung_up: bool = False
    is_ended: bool = False
    """By the hub."""


class HubMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = StillLoop()
        self.patch = pytest.MonkeyPatch()
        for name in ("MAX_PARKED", "MAX_LIVE", "MAX_STREAMS"):
            self.patch.setattr(relay, name, globals()[name])
        self.patch.setattr(relay, "time", SimpleNamespace(monotonic=self.loop.time))
        self.registered: dict[WorkerId, Member] = {}
        self.lots: dict[Member, Lot] = {}
        self.streams: list[Stream] = []
        self.dials: list[Dial] = []
        self.hub = RelayHub(lambda member: self.registered.get(member.worker_id) == member)
        self.lots[MEMBERS[0]] = Lot(self.loop.now_s)
        self.do(self.find_folder())

    def do(self, what: Coroutine[Any, Any, Any]) -> None:
        async def settled() -> None:
            await what
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settled())

    async def find_folder(self) -> None:
        self.folder = Path(self.hub.target(MEMBERS[0]).removeprefix("unix:")).parent

    # ---- what may happen ----

    @rule(member=st.sampled_from(MEMBERS))
    def register(self, member: Member) -> None:
        self.registered[member.worker_id] = member
        self.hub.forget_others(member)
        for other in [m for m in self.lots if m.worker_id == member.worker_id and m != member]:
            self.tidy(self.lots[other])
        self.do(asyncio.sleep(0))

    @rule(name=st.sampled_from([WorkerId("w"), WorkerId("v")]))
    def unregister(self, name: WorkerId) -> None:
        member = self.registered.pop(name, None)
        if member is not None:
            self.hub.forget(member)
            self.tidy(self.lots.get(member))
        self.do(asyncio.sleep(0))

    @rule(member=st.sampled_from(MEMBERS))
    def park(self, member: Member) -> None:
        num_open = sum(not stream.is_over for stream in self.streams)
        for other in [m for m in self.lots if m.worker_id == member.worker_id and m != member]:
            if self.registered.get(member.worker_id) != other:
                for stream in [*self.lots[other].parked]:
                    self.end(stream)
                self.lots.pop(other, None)
        stream = Stream(Lot(self.loop.now_s), self.loop.now_s)
        self.streams.append(stream)
        if num_open >= MAX_STREAMS:
            stream.is_over, stream.error = True, LimitError
        else:
            lot = stream.lot = self.lots.setdefault(member, stream.lot)
            if len(lot.parked) >= MAX_PARKED:
                stream.is_over, stream.error = True, LimitError
            else:
                lot.had_streams = True
                lot.parked.append(stream)
                self.match(lot)

        async def carrying() -> None:
            carry = self.hub.carry(member, stream.sent.get, stream.came.put, self.nothing)
            stream.call = asyncio.create_task(carry)

        self.do(carrying())

    async def nothing(self) -> None:
        """Nobody is told."""

    @rule(member=st.sampled_from(MEMBERS))
    def dial(self, member: Member) -> None:
        lot = self.lots.setdefault(member, Lot(self.loop.now_s))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        made = Dial(lot, connection, self.loop.now_s)
        self.dials.append(made)
        if len(lot.live) + len(lot.waiting) >= MAX_LIVE:
            made.is_ended = True
        else:
            lot.waiting.append(made)
            self.match(lot)

        async def connecting() -> None:
            path = self.hub.target(member).removeprefix("unix:")
            await self.loop.sock_connect(connection, path)
            await self.loop.sock_sendall(connection, HELLO)

        self.do(connecting())

    @precondition(lambda self: any(lot.live for lot in self.lots.values()))
    @rule(data=st.data(), size=st.integers(1, 1000))
    def talk(self, data: st.DataObject, size: int) -> None:
        stream = data.draw(st.sampled_from([s for lot in self.lots.values() for s in lot.live]))
        assert stream.dial is not None
        stream.dial.connection.sendall(b"d" * size)
        self.do(stream.sent.put(b"s" * size))
        assert b"".join(stream.came.get_nowait() for _ in range(stream.came.qsize())) == b"d" * size
        assert stream.dial.connection.recv(2 * size) == b"s" * size

    @precondition(lambda self: any(not stream.is_over for stream in self.streams))
    @rule(data=st.data())
    def end_stream(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from([s for s in self.streams if not s.is_over]))
        self.end(stream)
        self.do(stream.sent.put(None))

    @precondition(lambda self: any(lot.parked for lot in self.lots.values()))
    @rule(data=st.data())
    def speak_first(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from([s for lot in self.lots.values() for s in lot.parked]))
        self.end(stream)
        stream.error = InvalidInputError
        self.do(stream.sent.put(b"too early"))

    @precondition(lambda self: any(not d.is_ended and not d.has_hung_up for d in self.dials))
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        open_ones = [d for d in self.dials if not d.is_ended and not d.has_hung_up]
        dial = data.draw(st.sampled_from(open_ones))
        dial.connection.close()
        dial.has_hung_up = True
        for stream in self.streams:
            if stream.dial is dial and not stream.is_over:
                self.end(stream)
        self.do(asyncio.sleep(0))

    @rule(seconds=st.sampled_from([DIAL_WAIT_S / 2, DIAL_WAIT_S, PARKED_FOR_S / 2, PARKED_FOR_S]))
    def let_time_pass(self, seconds: float) -> None:
        self.loop.now_s += seconds
        for stream in self.streams:
            is_parked = not stream.is_over and stream.dial is None
            if is_parked and self.loop.now_s >= stream.since_s + PARKED_FOR_S:
                self.end(stream)
        for dial in self.dials:
            lot = dial.lot
            if dial in lot.waiting and self.loop.now_s >= dial.since_s + DIAL_WAIT_S:
                dial.is_ended = True
                lot.waiting.remove(dial)
                self.tidy(lot)
        self.do(asyncio.sleep(0))

    # ---- what follows in the model ----

    def match(self, lot: Lot) -> None:
        while lot.parked and lot.waiting:
            stream, dial = lot.parked.pop(), lot.waiting.popleft()
            stream.dial = dial
            lot.live.append(stream)
            if dial.has_hung_up:
                self.end(stream)

    def end(self, stream: Stream) -> None:
        lot = stream.lot
        stream.is_over = True
        (lot.live if stream.dial is not None else lot.parked).remove(stream)
        if stream.dial is not None:
            stream.dial.is_ended = True
        lot.emptied_s = self.loop.now_s
        self.tidy(lot)

    def tidy(self, lot: Lot | None) -> None:
        for member, known in [*self.lots.items()]:
            is_idle = not (known.parked or known.waiting or known.live)
            if known is lot and is_idle and self.registered.get(member.worker_id) != member:
                del self.lots[member]

    # ---- what holds ----

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        lots = self.lots.values()
        assert self.hub.counts() == {
            "parked": sum(len(lot.parked) for lot in lots),
            "live": sum(len(lot.live) for lot in lots),
        }

    @invariant()
    def streams_end_when_the_model_says(self) -> None:
        for stream in self.streams:
            assert stream.call is not None
            assert stream.call.done() == stream.is_over
            if stream.is_over:
                error = stream.call.exception()
                assert error is None if stream.error is None else isinstance(error, stream.error)

    @invariant()
    def the_newest_stream_carries_the_oldest_dial(self) -> None:
        for stream in self.streams:
            if stream.dial is not None and not stream.is_greeted:
                stream.is_greeted = True
                assert stream.came.get_nowait() == HELLO
            assert stream.came.empty()

    @invariant()
    def dials_end_when_the_model_says(self) -> None:
        for dial in self.dials:
            if not dial.has_hung_up:
                assert has_ended(dial.connection) == dial.is_ended

    @invariant()
    def silence_is_that_of_the_model(self) -> None:
        for member in MEMBERS:
            lot, said = self.lots.get(member), self.hub.silence(member)
            who = f"worker {member.worker_id} keeps no tunnel open"
            if lot is None:
                assert said == who
                continue
            silent_s = self.loop.now_s - lot.emptied_s
            if lot.parked or lot.live or silent_s < DIAL_WAIT_S:
                assert said == ""
            else:
                last = f"{'last one' if lot.had_streams else 'none for'} {silent_s:.0f} s"
                assert said == f"{who} ({last}{' ago' if lot.had_streams else ''})"

    @invariant()
    def there_is_a_socket_for_each_lot_and_no_other(self) -> None:
        known = {Path(self.hub.target(member)).name for member in self.lots}
        assert {*os.listdir(self.folder)} == known

    def teardown(self) -> None:
        self.do(self.hub.close())
        assert all(stream.is_over or self.ends_at_last(stream) for stream in self.streams)
        assert not self.folder.exists()
        for dial in self.dials:
            dial.connection.close()
        self.loop.close()
        self.patch.undo()

    def ends_at_last(self, stream: Stream) -> bool:
        """Whether a stream is over once the worker has ended it too."""
        self.do(stream.sent.put(None))
        return stream.call is not None and stream.call.done()


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:  # it was ended with what the dial has said unread
        return True


TestHub = HubMachine.TestCase
TestHub.settings = settings(max_examples=10, stateful_step_count=40)
