"""Track the newest values of a followed run by its items, the events and progress of `watch`.

The items are folded in order; neither clock nor terminal is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stratagem.client.course.rounds import RoundsFolding
from stratagem.client.course.views import (
    Event,
    Phase,
    Progress,
    RunStatus,
    is_of_verifier,
    number,
    numbers,
)

MOST_ROUNDS: Final = 8
"""The number of newest rounds to keep, because a late update counts in one of the next rounds."""
TRAINING: Final = "train."
"""The prefix of training metrics; those of a finished segment are in the step history."""


@dataclass(slots=True)
class Generations:
    """The state of a population's generations."""

    num_closed: int = 0
    scored: set[str] = field(default_factory=set)
    """The paths of the members that have committed a state in the open generation."""
    best: float | None = None
    best_member: int | None = None
    num_copied: int = 0
    """The number of members replaced by copies of others at the end of the last generation."""


@dataclass(slots=True)
class FollowedRun:
    """The newest values of a run, updated by the items (events and progress) of `watch`."""

    run_id: str
    name: str = ""
    strategy: str = ""
    """The short name of the strategy; by it the run counts steps, rounds or generations."""
    scored_by: str = ""
    """The metric that decides which state is the best one, such as "test.accuracy"."""
    phase: Phase = Phase.PENDING
    sentence: str = ""
    """The reason why the run is in its phase, or why it waits."""
    is_waiting: bool = False
    step: int = 0
    num_steps: int = 0
    committed: int = 0
    """The step of the newest commit."""
    segment: int = 0
    num_segments: int = 0
    loss: float | None = None
    """The loss of the newest reported step."""
    mean_loss: float | None = None
    """The mean loss over the steps of the newest finished segment."""
    latest: Progress | None = None
    """The newest progress; None once it no longer applies."""
    is_private: bool = False
    """Clients report no loss, as training is private and a loss would reveal something."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the newest evaluation."""
    evaluated: int = 0
    """The segment or round of the newest evaluation."""
    rounds: RoundsFolding = field(default_factory=lambda: RoundsFolding(most=MOST_ROUNDS))
    """The rounds of a federation."""
    has_news: bool = False
    """An evaluation came between the ends of the last two rounds."""
    generations: Generations = field(default_factory=Generations)
    num_members: int = 0
    """The number of members of a population."""
    _last_evaluated: int = 0
    """The value of `evaluated` at the close of the last round."""

    @classmethod
    def of(cls, status: RunStatus) -> "FollowedRun":
        """Make the state of a run from its status, before any of its events is known."""
        evaluation = status.job.get("evaluation") or {}
        best = evaluation.get("best") or ""
        return cls(
            run_id=status.run_id,
            name=status.name,
            strategy=status.strategy,
            scored_by=f"{evaluation.get('split')}.{best}" if best else "",
            num_steps=status.num_steps,
            num_segments=status.num_segments,
            committed=max((c.step for c in status.commits if c.member is None), default=0),
        )

    @property
    def is_federated(self) -> bool:
        return self.strategy.startswith("Federated")

    @property
    def is_population(self) -> bool:
        return self.strategy.startswith("PopulationBased")

    @property
    def has_begun(self) -> bool:
        """Return whether the run has done any step, segment, round or generation."""
        return bool(self.step or self.segment or self.rounds.number or self.generations.scored)

    def update(self, item: Event | Progress) -> None:
        """Update the state by the next item of the run."""
        match item:
            case Progress() if item.reason:
                self.sentence, self.is_waiting, self.latest = item.reason, True, None
            case Progress():
                self._progress(item)
            case Event() if is_of_verifier(item):
                self.phase = item.phase
            case Event():
                self.phase, self.sentence, self.is_waiting = item.phase, item.sentence, False
                self.rounds.fold(item)
                self._event(item.kind, item.payload)

    def _progress(self, item: Progress) -> None:
        self.is_waiting, self.latest = False, item
        self.step, self.num_steps = item.step, item.num_steps
        # A round or generation closes before its state is committed.
        is_ahead = self.is_federated or self.is_population
        self.segment = max(self.segment, item.segment) if is_ahead else item.segment
        self.num_segments = item.num_segments
        if item.step:
            self.loss = item.loss

    def _event(self, kind: str, payload: Mapping[str, Any]) -> None:
        if payload.get("party"):
            if kind == "SegmentCommitted" and "/" not in payload["party"]:
                self.generations.scored.add(payload["party"])
            return
        if fold := _FOLDS.get(kind):
            fold(self, payload)
        if kind in ("SegmentFinished", "SegmentCommitted", "Evaluated"):
            evaluations = evaluations_in(payload)
            if evaluations:
                self.metrics, self.evaluated = {**self.metrics, **evaluations}, payload["segment"]

    def _accounted(self, payload: Mapping[str, Any]) -> None:
        self.is_private = True

    def _population(self, payload: Mapping[str, Any]) -> None:
        self.num_members = len(payload["params"])

    def _finished(self, payload: Mapping[str, Any]) -> None:
        self.segment, self.step = payload["segment"], payload["step"]
        self.mean_loss = number(payload["loss"]) if payload["step"] else None

    def _committed(self, payload: Mapping[str, Any]) -> None:
        self.committed = payload["step"]

    def _resumed(self, payload: Mapping[str, Any]) -> None:
        self.latest = None
        if payload.get("from_segment") is not None:
            self.segment, self.step = payload["from_segment"], payload.get("step", 0)
            self.committed = self.step
            self.generations = Generations()

    def _closed(self, payload: Mapping[str, Any]) -> None:
        self.segment = payload["round_num"]
        self.has_news, self._last_evaluated = self.evaluated > self._last_evaluated, self.evaluated

    def _generation(self, payload: Mapping[str, Any]) -> None:
        best = payload["best"]
        score = payload["metrics"].get(self.scored_by, payload["scores"][best])
        score = None if score is None else number(score)
        self.segment = payload["generation"]
        self.generations = Generations(
            num_closed=payload["generation"],
            best=score,
            best_member=best,
            num_copied=len(payload.get("copied", ())),
        )


_FOLDS: Final[Mapping[str, Callable[[FollowedRun, Mapping[str, Any]], None]]] = {
    "RunResumed": FollowedRun._resumed,
    "SegmentFinished": FollowedRun._finished,
    "SegmentCommitted": FollowedRun._committed,
    "RoundAccounted": FollowedRun._accounted,
    "RoundClosed": FollowedRun._closed,
    "PopulationFormed": FollowedRun._population,
    "GenerationClosed": FollowedRun._generation,
}


def evaluations_in(payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the evaluation metrics in an event's payload."""
    metrics = numbers(payload.get("metrics"))
    return {name: value for name, value in metrics.items() if not name.startswith(TRAINING)}
