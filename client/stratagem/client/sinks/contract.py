"""What a sink is: something that takes the rows and facts of a run, and remembers how far it is.

A package offers one under its entry point in the group `stratagem.sinks`, a callable that is given
the text behind the name: the class `TensorBoardSink` is called with "DIR" for "tensorboard:DIR".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from stratagem.client.course.payloads import numbers, party_of
from stratagem.client.sdk.views import Event
from stratagem.common.history.columns import Columns

GROUP: Final = "stratagem.sinks"


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run whose rows a sink takes."""

    run_id: str
    name: str
    strategy: str
    submitted_at_s: float
    job: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of one series, in order of step."""

    party: str
    """Whose steps they are; "" is the whole run."""
    series: str
    stride: int
    """The steps that a row stands for, at most."""
    observed: bool
    """Depends on clocks and machines: two runs of one job differ in it."""
    columns: Columns

    @property
    def name(self) -> str:
        """Return the name of the series among those of all parties."""
        return f"{self.party}/{self.series}" if self.party else self.series


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of a run a sink has."""

    event_index: int = -1
    """The last event."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """The last step, by name of series."""
    size: int = 0
    """Of a sink that is a file: its bytes."""


class Sink(Protocol):
    """Called from one thread. Any exception is told to the user, and the sink is opened again."""

    def open(self, run: SinkRun) -> Cursor:
        """Return how much of the run is there, and drop what is behind that.

        Raises InvalidInputError where the target is no place for the run.
        """
        ...

    def restart(self) -> Cursor:
        """Drop what can be dropped, as the run has gone back to an earlier step.

        Returns what stays.
        """
        ...

    def rows(self, block: RowBlock) -> None:
        """Take rows: of a series each step comes once, and in order."""
        ...

    def fact(self, event: Event) -> None:
        """Take an event; each comes once, and in order."""
        ...

    def keep(self, cursor: Cursor) -> None:
        """Make all durable that has come, then the cursor that says so."""
        ...

    def close(self) -> None:
        """Let go of what is open; nothing comes after this."""
        ...


def values_of(event: Event) -> tuple[int, dict[str, float]]:
    """Return the numbers that an event adds to the steps' own, and their step (or round).

    Those of evaluations, of a federation's rounds, and of the best member of a population.
    """
    fact = event.payload
    if party_of(event):
        return 0, {}
    found = numbers(fact.get("metrics"))
    match event.kind:
        case "SegmentFinished":  # what is of its training stands in the history of its steps
            step, kept = (
                fact["step"],
                {n: v for n, v in found.items() if not n.startswith("train.")},
            )
        case "Evaluated":
            step, kept = fact["segment"], found
        case "RoundClosed":
            step, kept = fact["round_num"], found
        case "GenerationClosed":
            step, kept = fact["step"], found
        case _:
            step, kept = 0, {}
    return int(step), kept
