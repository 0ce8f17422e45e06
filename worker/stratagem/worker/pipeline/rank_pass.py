"""Run one pass of a rank through its list of actions: compute, send at once, wait only when needed.

The module has the addresses, the micro-batches that are under way on this rank, and the messages
between its stages. It does not know the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stratagem.common.model.stages import Boundary, StagePlan
from stratagem.common.pipeline.schedules import Action, TaskKind, base_of, control_tag, tag_of
from stratagem.common.process.failpoints import failpoint
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.pipeline.messages import Address, Message, StageTransport
from stratagem.worker.pipeline.stage import Kept, StagePart
from stratagem.worker.pipeline.times import StageTimes
from stratagem.worker.user_code.entrypoints import user_code


@dataclass(frozen=True, slots=True)
class StageChannel:
    """A rank's view of its pipeline: its number, the stage plan, the transport, and the timeout."""

    plan: StagePlan
    rank_of: tuple[int, ...]
    """The rank of each stage, by stage number."""
    rank: int
    transport: StageTransport
    timeout_s: float
    """The longest wait for one message."""

    @property
    def size(self) -> int:
        return max(self.rank_of) + 1

    def stages(self) -> list[int]:
        return [stage for stage, rank in enumerate(self.rank_of) if rank == self.rank]

    def address(
        self, step: int, boundary: Boundary, count: int, micro_batch: int, *, backward: bool
    ) -> Address:
        """Return the address of an activation, or with `backward` of its gradient. count:
        micro-batches of the step."""
        ends = (self.rank_of[boundary.source], self.rank_of[boundary.target])
        source, target = reversed(ends) if backward else ends
        tag = tag_of(base_of(boundary.number, count), micro_batch, backward=backward)
        direction = "backward" if backward else "forward"
        label = f"boundary {boundary.number}, micro-batch {micro_batch}, {direction}"
        return Address(step, source, target, tag, label)

    def control(self, step: int, count: int, number: int, source: int, target: int) -> Address:
        """Return a control message's address, unique by step, number, sender and receiver."""
        tag = control_tag(self.plan.num_boundaries, count, number)
        return Address(step, source, target, tag, f"control {number}, from {source}, to {target}")


@dataclass(frozen=True, slots=True)
class PassCallbacks:
    """The functions by which a pass loads its data and computes its loss.

    begin(micro_batch) starts the drawing of random numbers; load() then reads (x, y, rows);
    lose(output, y, rows, micro_batch) returns the loss from which backward begins, or None.
    """

    activity: str
    begin: Callable[[int], None]
    load: Callable[[int], tuple[Any, Any, int]]
    lose: Callable[[Any, Any, int, int], Tensor | None]


class Gauge(Protocol):
    """The interface of observers that measure a pass."""

    def time(self, kind: TaskKind) -> AbstractContextManager[None]:
        """Return a context manager around the computation of one micro-batch, without waits and
        sends."""

    def sent(self, rank: int, message: Message) -> None:
        """Note that a message is sent to another rank."""


class RankPass:
    """Executes one pass of a rank. step: the pass's number. count: number of micro-batches."""

    def __init__(
        self,
        lane: StageChannel,
        parts: Mapping[int, StagePart],
        step: int,
        count: int,
        gauge: Gauge | None = None,
        times: StageTimes | None = None,
    ) -> None:
        self._lane, self._parts, self._step, self._count = lane, parts, step, count
        self._gauge, self._times = gauge, times
        self._traces: dict[tuple[int, int], Kept] = {}
        self._local: dict[Address, Message] = {}

    def awaited(self) -> Iterator[Address]:
        """Yield the addresses of all messages that may come from other ranks: activations,
        gradients and credits."""
        for micro_batch in range(self._count):
            for part in self._parts.values():
                for boundaries, backward in ((part.before, False), (part.after, True)):
                    for boundary in boundaries:
                        address = self._address(boundary, micro_batch, backward=backward)
                        if address.source != address.target:
                            yield address

    def train(self, actions: Sequence[Action], work: PassCallbacks) -> None:
        """Run forward and backward of all micro-batches, in the order of `actions`."""
        for action in actions:
            part, key = self._parts[action.stage], (action.stage, action.micro_batch)
            if action.kind is TaskKind.FORWARD:
                self._traces[key] = self._forward(part, action, work)
                continue
            if action.kind is TaskKind.WEIGHT:
                with self._computing(action), user_code(work.activity):
                    part.backward_weight(self._traces.pop(key))
                continue
            is_whole = action.kind is TaskKind.BACKWARD
            trace = self._traces.pop(key) if is_whole else self._traces[key]
            with self._waiting(action.stage):
                received = {
                    boundary.number: self._recv(boundary, action.micro_batch, backward=True)
                    for boundary in part.after
                    if trace.left[boundary.number]
                }
            failpoint("worker.stages.before_backward")
            with self._timed(action), user_code(work.activity):
                sent = (part.backward if is_whole else part.backward_input)(trace, received)
            for boundary in part.before:
                if boundary.number in sent:
                    message = sent[boundary.number]
                    self._send(boundary, action.micro_batch, message, backward=True)

    @torch.no_grad()
    def forward_only(self, actions: Sequence[Action], work: PassCallbacks, window: int) -> None:
        """Run forward of all micro-batches, at most `window` of them ahead of the next stage.

        The empty backward message of a micro-batch is a credit: the sender may send one more.
        """
        for action in actions:
            part, micro_batch = self._parts[action.stage], action.micro_batch
            for boundary in part.after:
                if micro_batch >= window:
                    self._recv(boundary, micro_batch - window, backward=True)
            self._forward(part, action, work)
            for boundary in part.before:
                self._send(boundary, micro_batch, Message(), backward=True)
        for part in self._parts.values():
            for boundary in part.after:
                for micro_batch in range(max(0, self._count - window), self._count):
                    self._recv(boundary, micro_batch, backward=True)

    def _forward(self, part: StagePart, action: Action, work: PassCallbacks) -> Kept:
        micro_batch = action.micro_batch
        with self._waiting(action.stage):
            received = {
                boundary.number: self._recv(boundary, micro_batch, backward=False)
                for boundary in part.before
            }
        with self._timed(action):
            work.begin(micro_batch)
            x, y, num_rows = None, None, 0
            if part.reads_input or part.is_last:
                x, y, num_rows = work.load(micro_batch)
            with user_code(work.activity):
                trace, sent = part.forward(x, received)
                if part.is_last:
                    trace.loss = work.lose(trace.output, y, num_rows, micro_batch)
                    trace.output = None
        for boundary in part.after:
            self._send(boundary, micro_batch, sent[boundary.number], backward=False)
        return trace

    def _timed(self, action: Action) -> AbstractContextManager[object]:
        """Return a context manager that times an action, also by the gauge (observer), if any."""
        if self._gauge is None:
            return self._computing(action)
        both = ExitStack()
        both.enter_context(self._computing(action))
        both.enter_context(self._gauge.time(action.kind))
        return both

    def _computing(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self._times is None else self._times.computing(action)

    def _waiting(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext() if self._times is None else self._times.waiting(stage)

    def _address(self, boundary: Boundary, micro_batch: int, *, backward: bool) -> Address:
        return self._lane.address(self._step, boundary, self._count, micro_batch, backward=backward)

    def _send(
        self, boundary: Boundary, micro_batch: int, message: Message, *, backward: bool
    ) -> None:
        address = self._address(boundary, micro_batch, backward=backward)
        if address.source == address.target:
            self._local[address] = message
        else:
            if self._gauge is not None:
                self._gauge.sent(address.target, message)
            self._lane.transport.send(address, message)

    def _recv(self, boundary: Boundary, micro_batch: int, *, backward: bool) -> Message:
        address = self._address(boundary, micro_batch, backward=backward)
        if address.source == address.target:
            return self._local.pop(address)
        try:
            return self._lane.transport.recv(address, self._lane.timeout_s)
        except ExchangeError as error:
            what, ends = "activation", (boundary.source, boundary.target)
            if backward:
                what, ends = "gradient", (boundary.target, boundary.source)
            raise ExchangeError(
                f"stage {ends[1]} got no {what} of micro-batch {micro_batch} from stage "
                f"{ends[0]}: {error}"
            ) from error
