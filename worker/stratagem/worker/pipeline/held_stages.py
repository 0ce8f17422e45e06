"""The parts of a pipeline that a worker holds under one membership: its stages and their
connections."""

from dataclasses import dataclass
from typing import Protocol

from stratagem.worker.mesh import Link, SharedGroup
from stratagem.worker.mesh.link import MessageLink
from stratagem.worker.pipeline.rank_trainer import Reduce, StageRunner
from stratagem.worker.pipeline.stage_transport import StageTransport


class Interruptible(Protocol):
    """A connection that a thread may be blocked in, and that can be cut and closed."""

    def cut(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Lines:
    """The connections of one rank: to the other ranks of its replica, to equal ranks of others.

    They are a party's own: once one is cut all are, for a step needs them all.
    """

    transport: StageTransport
    carrier: MessageLink | None = None
    """What carries the transport's messages, where that must be freed."""
    column: Link | SharedGroup | None = None
    """To the ranks of other replicas that hold the same stages."""
    exchange: Interruptible | None = None
    """What has taken `column` over."""

    def cut(self) -> None:
        """Cuts all connections. From any thread, any number of times."""
        self.transport.cut()
        for line in (self.carrier, self.exchange or self.column):
            if line is not None:
                line.cut()

    def close(self) -> None:
        """Frees everything; cut comes first."""
        for line in (self.carrier, self.exchange or self.column):
            if line is not None:
                line.close()


@dataclass(frozen=True, slots=True)
class HeldStages:
    """A rank that can take steps as long as no member is lost."""

    membership: int
    runner: StageRunner
    reduce: Reduce | None
    """None where there is one shard."""
    lines: Lines
    replica: int
    carrier: str
    """For people: what carries activations."""
    columns: str = ""
    """For people: what carries gradients between replicas; empty where there is one."""

    @property
    def engine(self) -> str:
        """The engines that carry messages and the order in which stages work, for people."""
        text = self.runner.schedule_text
        order = f" {text}" if text else ""
        return f"{self.carrier}{order}{self.columns}"

    @property
    def shares_memory(self) -> bool:
        """True if messages to the other ranks of the replica go through shared memory."""
        return self.lines.carrier is not None and self.lines.carrier.name == "shm"

    def cut(self) -> None:
        self.lines.cut()

    def close(self) -> None:
        self.lines.close()
