"""Which items of a run are worth a line of their own, and what it says.

Pure. One line per segment, round, generation and phase; what goes wrong is always said.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stratagem.client.course.failure import failure_text
from stratagem.client.course.payloads import ENDS
from stratagem.client.sdk.views import Event, Phase, Progress
from stratagem.client.terminal.followed_run import FollowedRun, evaluations_in
from stratagem.client.terminal.run_line import (
    SEPARATOR,
    best_text,
    clients_text,
    count_text,
    evaluation_texts,
    loss_of,
)
from stratagem.client.terminal.wording import number_text
from stratagem.common.base.text import values_text

TROUBLE: Final = frozenset({"BuildFailed", "PartyFailed", "ProcessDied", "RoundWaits"})
ONCE: Final = frozenset({"RunSubmitted", "RunResumed", "ModelBuilt", "Noted"})
"""Facts about the whole run whose sentence says all."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A line about what has just happened."""

    text: str
    is_urgent: bool = False
    """It is printed at once, also where lines are rare."""


def milestone(before: Phase, run: FollowedRun, item: Event | Progress) -> Milestone | None:
    """Return the line that an item is worth, if any.

    before: the phase of the run before the item; run: as it is with it.
    """
    if not isinstance(item, Event):
        return None
    if item.kind in ENDS:
        text = item.sentence if item.phase is Phase.COMPLETED else _reached(run, item)
        return Milestone(SEPARATOR.join(filter(None, (item.phase, text))), is_urgent=True)
    if item.kind in TROUBLE:
        return Milestone(f"{item.phase}{SEPARATOR}{item.sentence}", is_urgent=True)
    if item.phase is not before and (item.phase is Phase.RECOVERING or before is Phase.RECOVERING):
        return Milestone(f"{item.phase}{SEPARATOR}{item.sentence}", is_urgent=True)
    if item.payload.get("party"):
        return None
    match item.kind:
        case "SegmentFinished":
            return _line(_segment(run, item))
        case "RoundClosed":
            return _line(_round(run))
        case "GenerationClosed":
            return _line(_generation(run, item))
        case "Evaluated" if not run.is_federated:  # a round's stands in the next line
            return Milestone(item.sentence)
        case "MembersFormed":
            is_first = item.payload.get("membership") == 1
            return Milestone(item.sentence, is_urgent=not is_first)
        case kind if kind in ONCE or (item.phase is not before and not item.phase.is_final):
            is_unusual = bool(item.payload.get("warning") or item.payload.get("conversion"))
            return Milestone(item.sentence, is_urgent=is_unusual)
        case _:
            return None


def _reached(run: FollowedRun, end: Event) -> str:
    """Return how far a run has come that has ended before its end."""
    counts_steps = not (run.is_federated or run.is_population)
    if end.kind == "RunFailed" and run.has_begun and counts_steps:
        activity = (end.payload.get("error") or {}).get("activity") or ""
        return failure_text(run.committed, activity, run.step, run.num_steps)
    return f"at {count_text(run)}" if run.has_begun else ""


def _line(parts: Iterator[str]) -> Milestone:
    return Milestone(SEPARATOR.join(part for part in parts if part))


def _segment(run: FollowedRun, event: Event) -> Iterator[str]:
    segment, of = event.payload["segment"], f"/{run.num_segments}" if run.num_segments else ""
    yield f"segment {segment}{of}"
    if run.step:
        yield count_text(run)
    if run.mean_loss is not None:
        yield f"mean loss {number_text(run.mean_loss)}"
    yield from evaluation_texts(run, evaluations_in(event.payload))
    seconds, num_rows = event.payload.get("seconds"), event.payload.get("num_rows")
    if seconds and num_rows and run.step:
        yield f"{num_rows / seconds:,.0f} rows/s"
    if again := event.payload.get("num_redone_steps"):
        yield f"{again} steps done again"


def _round(run: FollowedRun) -> Iterator[str]:
    yield count_text(run)
    yield clients_text(run)
    loss = loss_of(run)
    yield "" if loss is None else f"loss {number_text(loss)}"
    if run.has_news:
        texts = evaluation_texts(run)
        yield from texts[:-1]
        yield f"{texts[-1]} (after round {run.evaluated})"


def _generation(run: FollowedRun, event: Event) -> Iterator[str]:
    yield count_text(run)
    yield best_text(run)
    yield values_text(event.payload.get("params") or {})
    copied = run.generations.num_copied
    yield f"{copied} copied" if copied else ""
