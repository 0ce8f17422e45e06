"""Exchange a few values among the ranks of a pipeline once per step, so that all compute the same.

There are three rounds of messages from rank to rank: the loss and its weight, from the last stage
to all; gradients of tied parameters, among those that hold copies; norms and whether all is finite,
from all to all. Each rank then computes the same numbers from the same parts in the same order:
those of a single process. No round makes the first stage wait, which ends last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from stratagem.worker.engine.apply_step import StepSummary, are_finite
from stratagem.worker.engine.forward_backward import Counted
from stratagem.worker.exchange import GradientReducer
from stratagem.worker.exchange.layout import parts_of, total_norm
from stratagem.worker.exchange.transports import StepScalars
from stratagem.worker.mesh import Link, SharedGroup
from stratagem.worker.mesh.link import MessageLink
from stratagem.worker.models.nodes import Trained
from stratagem.worker.models.program import add_uses
from stratagem.worker.pipeline.messages import Address, Message, StageTransport
from stratagem.worker.pipeline.rank_pass import StageChannel

# ---- Agreement of a step ----

_TOTALS: Final = 0
_TIED: Final = 1
_VERDICT: Final = 2


class Agreement:
    """The rounds of messages of one rank. Methods are called once per step, in this order."""

    def __init__(self, lane: StageChannel, trained: Sequence[Trained], numerics: int) -> None:
        self._lane, self._trained, self._numerics = lane, trained, numerics
        self._holders = {
            weight.name: [self._rank_of(c.node) for c in weight.copies] for weight in trained
        }
        mine = [weight for weight in trained if lane.rank in self._holders[weight.name]]
        self.own = [self._here(weight) for weight in mine]
        """The parameters of this rank, each with the copies held here, in the model's order."""
        self._whole = {weight.name: weight for weight in mine}
        self._others = [rank for rank in range(lane.size) if rank != lane.rank]
        self._tied_with = {rank: self._shared(rank) for rank in self._others}
        self.step, self._count = -1, 0

    def is_first(self, own: Trained) -> bool:
        """Return whether this rank holds the parameter's first copy."""
        return self._holders[own.name][0] == self._lane.rank

    def begin(self, step: int, count: int) -> None:
        """Begin the message rounds of pass number `step`, with `count` micro-batches."""
        self.step, self._count = step, count

    def awaited(self) -> Iterator[Address]:
        """Yield the addresses of all messages that this rank will receive."""
        for rank in self._others:
            if rank == self._lane.rank_of[-1]:
                yield self._address(_TOTALS, rank, self._lane.rank)
            if self._tied_with[rank]:
                yield self._address(_TIED, rank, self._lane.rank)
            yield self._address(_VERDICT, rank, self._lane.rank)

    def share_loss(self, counted: Counted) -> Counted:
        """Send the loss from the last stage's rank to all others; return it."""
        last = self._lane.rank_of[-1]
        if self._lane.rank != last:
            # A rank of version 0.2 sends the losses of its micro-batches behind these, too.
            weight, loss_sum = self._recv(_TOTALS, last).tensors[0].tolist()
            return Counted(loss_sum, weight)
        totals = torch.tensor([counted.weight, counted.loss_sum], dtype=torch.float64)
        for rank in self._others:
            self._send(_TOTALS, rank, Message([totals]))
        return counted

    def sum_tied(self) -> list[bool]:
        """Sum the gradients of tied parameters over all ranks, into the .grad of the first copy on
        this rank; return for each parameter of this rank whether backward reached it."""
        for rank, shared in self._tied_with.items():
            if shared:
                self._send(_TIED, rank, self._gradients_of(shared))
        foreign: dict[tuple[str, str], Tensor] = {}
        for rank, shared in self._tied_with.items():
            if shared:
                message = self._recv(_TIED, rank)
                names = [(name, node) for name, node in message.words["copies"]]
                foreign |= dict(zip(names, message.tensors, strict=True))
        totals = [self._total(weight, foreign) for weight in self.own]
        for weight, total in zip(self.own, totals, strict=True):
            weight.forget()
            weight.param.grad = total
        return [total is not None for total in totals]

    def summarize(self, scalars: StepScalars) -> tuple[StepSummary, float]:
        """Return the step's summary over all ranks, and the largest `stop` of any rank (see
        StepScalars). Norms are those of the .grad of the first copies."""
        grads = {
            weight.name: weight.param.grad for weight in self.own if weight.param.grad is not None
        }
        parts = dict(zip(grads, parts_of(list(grads.values()), self._numerics), strict=True))
        rank_norm = total_norm(list(parts.values()), self._numerics)
        is_finite = are_finite(rank_norm, list(grads.values()))
        firsts = {weight.name for weight in self.own if self.is_first(weight)}
        norms = {name: norm for name, norm in parts.items() if name in firsts}
        words = {"is_finite": is_finite, "stop": scalars.stop, "names": list(norms)}
        verdict = Message(list(norms.values()), words)
        for rank in self._others:
            self._send(_VERDICT, rank, verdict)
        said = [verdict, *(self._recv(_VERDICT, rank) for rank in self._others)]
        by_name: dict[str, Tensor] = {}
        for message in said:
            by_name |= zip(message.words["names"], message.tensors, strict=True)
        ordered = [by_name[weight.name] for weight in self._trained if weight.name in by_name]
        device = (self.own[0].param if self.own else torch.zeros(())).device
        norm = total_norm([part.to(device) for part in ordered], self._numerics)
        is_finite = all(message.words["is_finite"] for message in said)
        stop = max(message.words["stop"] for message in said)
        return StepSummary(scalars.loss, scalars.weight, norm, is_finite), stop

    def _rank_of(self, node: str) -> int:
        return self._lane.rank_of[self._lane.plan.stage_of[node]]

    def _here(self, weight: Trained) -> Trained:
        copies = [c for c in weight.copies if self._rank_of(c.node) == self._lane.rank]
        return Trained(weight.name, tuple(copies))

    def _shared(self, rank: int) -> list[Trained]:
        """Return the parameters of this rank of which that rank holds copies, too."""
        return [weight for weight in self.own if rank in self._holders[weight.name]]

    def _gradients_of(self, shared: Sequence[Trained]) -> Message:
        copies = [
            ([weight.name, copy.node], copy.param.grad)
            for weight in shared
            for copy in weight.copies
            if copy.param.grad is not None
        ]
        return Message([grad for _, grad in copies], {"copies": [name for name, _ in copies]})

    def _total(self, weight: Trained, foreign: dict[tuple[str, str], Tensor]) -> Tensor | None:
        grads = {copy.node: copy.param.grad for copy in weight.copies}
        return add_uses(
            grads[copy.node] if copy.node in grads else self._arrived(weight, copy.node, foreign)
            for copy in self._whole[weight.name].copies
        )

    def _arrived(
        self, weight: Trained, node: str, foreign: dict[tuple[str, str], Tensor]
    ) -> Tensor | None:
        gradient = foreign.get((weight.name, node))
        return None if gradient is None else gradient.to(weight.param.device)

    def _address(self, number: int, source: int, target: int) -> Address:
        return self._lane.control(self.step, self._count, number, source, target)

    def _send(self, number: int, rank: int, message: Message) -> None:
        self._lane.transport.send(self._address(number, self._lane.rank, rank), message)

    def _recv(self, number: int, rank: int) -> Message:
        address = self._address(number, rank, self._lane.rank)
        return self._lane.transport.recv(address, self._lane.timeout_s)


# ---- Exchange of a rank ----
#
# One rank has its connections and the sum of its gradients over the replicas under one membership.


@dataclass(frozen=True, slots=True)
class StageGradients:
    """A shard's contribution to a step: the interface for data parallelism around a pipeline.

    gradients: Σ mean · weight per parameter of this rank, not divided; zeros if backward did not
    reach it. scalars: to be added in the same order as the gradients.
    """

    gradients: Mapping[str, Tensor]
    scalars: StepScalars


Reduce = Callable[[int, Iterator[StageGradients]], StageGradients]
"""A function that sums StageGradients over all shards of this rank, in their tree. It gets the
number of live shards, and an iterator over those of this replica, which computes each on demand and
must be exhausted. Called before the division by the weight."""


def only_shard(num_live: int, shards: Iterator[StageGradients]) -> StageGradients:
    """Return the only shard's gradients: the `Reduce` of a pipeline without replicas."""
    (one,) = shards
    return one


class Interruptible(Protocol):
    """A connection that may block a thread, and that can be cut and closed from another one."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class StageExchange:
    """Connections of one rank to the ranks of its replica, and to equal ranks of others.

    All belong to one party: if one is cut, all are cut, since a step needs them all.
    """

    transport: StageTransport
    carrier: MessageLink | None = None
    """The link under the transport of messages, if it must be closed; else None."""
    column: Link | SharedGroup | None = None
    """The link to the ranks of other replicas with the same stages; None without other replicas."""
    reducer: GradientReducer | None = None
    """The reducer that sums gradients over `column` and owns it."""
    reduce: Reduce = only_shard
    activations: str = ""
    """Name of the engine that carries activations, for display."""
    schedule_text: Callable[[], str] = str
    """Returns the name of the schedule in use, for display; it may change between steps."""
    columns: str = ""
    """Name of the engine for gradients between replicas, for display; empty without any."""

    @property
    def name(self) -> str:
        """Names of the engines in use and of the schedule, for display."""
        text = self.schedule_text()
        order = f" {text}" if text else ""
        return f"{self.activations}{order}{self.columns}"

    @property
    def shares_memory(self) -> bool:
        lines = (self.carrier, self.column)
        return any(line is not None and line.name == SharedGroup.name for line in lines)

    def cut(self) -> None:
        """Cut all connections. May be called from any thread, repeatedly."""
        self.transport.cut()
        for line in self._lines():
            line.cut()

    def close(self) -> None:
        """Free all connections; call `cut` first."""
        for line in self._lines():
            line.close()

    def _lines(self) -> Iterator[Interruptible]:
        lines: tuple[Interruptible | None, ...] = (self.carrier, self.reducer or self.column)
        return (line for line in lines if line is not None)
