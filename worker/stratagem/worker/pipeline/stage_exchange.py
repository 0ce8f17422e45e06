"""The exchange of one rank of a pipeline under one membership: its connections, and the sum of its
gradients over the replicas."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stratagem.worker.exchange import GradientReducer
from stratagem.worker.exchange.buckets.step_scalars import StepScalars
from stratagem.worker.mesh import Link, SharedGroup
from stratagem.worker.mesh.link import MessageLink
from stratagem.worker.pipeline.stage_transport import StageTransport


@dataclass(frozen=True, slots=True)
class StageGradients:
    """The contribution of a shard to a step: the interface for data parallelism around a pipeline.

    gradients: Σ mean · weight by parameter of this rank, not divided; zeros where backward did not
    reach. scalars: to be added in the same order as gradients.
    """

    gradients: Mapping[str, Tensor]
    scalars: StepScalars


Reduce = Callable[[int, Iterator[StageGradients]], StageGradients]
"""Adds up over all shards of this rank, in their tree. It is given how many shards have rows, and
what the shards of this replica come to, in order: each is computed when it is asked for, and all
must be. Called before the division by the weight."""


def only_shard(num_live: int, shards: Iterator[StageGradients]) -> StageGradients:
    """Returns the sum where there is one shard."""
    (one,) = shards
    return one


class Interruptible(Protocol):
    """A connection that a thread may be blocked in, and that can be cut and closed."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class StageExchange:
    """The connections of one rank: to the other ranks of its replica, to equal ranks of others.

    They are a party's own: once one is cut all are, for a step needs them all.
    """

    transport: StageTransport
    carrier: MessageLink | None = None
    """What carries the transport's messages, where that must be freed."""
    column: Link | SharedGroup | None = None
    """To the ranks of other replicas that hold the same stages."""
    reducer: GradientReducer | None = None
    """What has taken `column` over."""
    reduce: Reduce = only_shard
    activations: str = ""
    """For people: what carries activations."""
    schedule_text: Callable[[], str] = str
    """For people: the order in which stages work, which steps may choose again."""
    columns: str = ""
    """For people: what carries gradients between replicas; empty where there is one."""

    @property
    def name(self) -> str:
        """The engines that carry messages and the order in which stages work, for people."""
        text = self.schedule_text()
        order = f" {text}" if text else ""
        return f"{self.activations}{order}{self.columns}"

    @property
    def shares_memory(self) -> bool:
        lines = (self.carrier, self.column)
        return any(line is not None and line.name == SharedGroup.name for line in lines)

    def cut(self) -> None:
        """Cuts all connections. From any thread, any number of times."""
        self.transport.cut()
        for line in self._lines():
            line.cut()

    def close(self) -> None:
        """Frees everything; cut comes first."""
        for line in self._lines():
            line.close()

    def _lines(self) -> Iterator[Interruptible]:
        lines: tuple[Interruptible | None, ...] = (self.carrier, self.reducer or self.column)
        return (line for line in lines if line is not None)
