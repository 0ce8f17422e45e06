"""The report that a training step of any kind returns, and sums of reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stratagem.worker.engine.forward_backward import LoggedSums, added, means


@dataclass(frozen=True, slots=True)
class PartReport:
    """The facts of a step that one member alone knows: of a node or a stage that is its own."""

    party: str
    """Its name within the party that trains, such as "node/3"."""
    exact: Mapping[str, float] = field(default_factory=dict)
    """Numbers by series that have the same bits whichever member has the part."""
    observed: Mapping[str, float] = field(default_factory=dict)
    """Numbers by series that depend on clocks and machines."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step that is done. `step` counts them, this one included."""

    step: int
    loss: float
    weight: float
    """Rows or tokens that the step learned from; none when it was skipped."""
    num_rows: int
    stop: bool
    grad_norm: float
    """2-norm of the whole gradient before clipping; of several nodes, the largest."""
    num_skipped: int = 0
    """1 when loss or gradient was not finite and the step changed nothing; of nodes, how many."""
    phase: str = ""
    """Under phase training. A predicted step has the loss of the last exact one, and no weight."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers about the step, besides the loss."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Those of the update that made the step, by series: see
    stratagem.worker.engine.apply_step."""
    logged: LoggedSums = field(default_factory=dict)
    """The sums of what the step function has logged."""
    news: Sequence[str] = field(default=(), compare=False)
    """Sentences for the run's log."""
    is_end: bool = False
    """True if nothing was done: all members end the training before this step, as on_step asked."""
    answered: Mapping[str, float] = field(default_factory=dict)
    """The log of on_step for the step before, as all members have learned with this one."""
    exchange_wait_s: float = field(default=0.0, compare=False)
    """Waiting for other members: from the end of this member's own passes until the sums of all
    were here; under a pipeline, for what its stages need."""
    parts: Sequence[PartReport] = field(default=(), compare=False)
    """The reports of the nodes or stages of this member."""
    actions: Callable[[], Sequence[PartReport]] = field(default=tuple, compare=False)
    """Returns what the stages of this member have done when in the step."""
    is_torn: bool = field(default=False, compare=False)
    """The step is applied here, and its exchange failed before what others have updated came: the
    members that are left have to form anew before the next one."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers about all nodes together that were measured in this step, by series."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The view of the step for on_step, as plain values."""
        return {
            "step": self.step,
            "loss": self.loss,
            "weight": self.weight,
            "num_rows": self.num_rows,
            "grad_norm": self.grad_norm,
            "metrics": self.progress_metrics,
        }

    @property
    def progress_metrics(self) -> dict[str, float]:
        """The metrics that are shown while the run is in progress; all members have them alike."""
        return {**self.metrics, **means(self.logged)}


def mean_loss(loss_sum: float, weight: float, num_skipped: float) -> float:
    """Return the mean loss of the steps of a segment; 0 where there was none, nan where all were
    skipped: no loss is known of them, and 0 would be the best there is."""
    if weight:
        return loss_sum / weight
    return math.nan if num_skipped else 0.0


def end_of(step: int) -> StepReport:
    """Return the report of the end of a training after `step` steps: of a step that is not
    done."""
    return StepReport(step, 0.0, 0.0, 0, stop=True, grad_norm=0.0, is_end=True)


@dataclass(slots=True)
class Tally:
    """Sums over the steps of one segment; travels with a state that is copied inside it."""

    segment: int = -1
    weight: float = 0.0
    loss_sum: float = 0.0
    num_rows: int = 0
    grad_norm: float = 0.0
    """2-norm of the whole gradient of the last applied step, before clipping."""
    max_grad_norm: float = 0.0
    num_skipped: int = 0
    """Steps (of single nodes, under gossip) that were not finite and changed nothing."""
    logged: LoggedSums = field(default_factory=dict)
    latest: dict[str, Any] = field(default_factory=dict)
    """The view of the latest exact step for on_step; empty where there is no such hook."""
    shown: dict[str, float] = field(default_factory=dict)
    """The latest number of each name that on_step has logged, as far as this member knows: of the
    latest step only the member that was shown it."""

    @property
    def loss(self) -> float:
        """The mean loss; 0 where there was no step, nan where all were skipped."""
        return mean_loss(self.loss_sum, self.weight, self.num_skipped)

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self.num_rows += report.num_rows
        self.num_skipped += report.num_skipped
        if report.answered:
            self.shown = {**self.shown, **report.answered}
        if not report.weight:  # all of it was skipped
            return
        self.weight += report.weight
        self.loss_sum += report.loss * report.weight
        if report.logged:
            self.logged = added(self.logged, report.logged)
        if math.isfinite(report.grad_norm):
            self.grad_norm = report.grad_norm
            self.max_grad_norm = max(self.max_grad_norm, report.grad_norm)

    def metrics(self, *, may_skip: bool) -> dict[str, float]:
        """Return the metrics of the segment, besides the loss."""
        skipped = {"skipped_steps": float(self.num_skipped)} if may_skip else {}
        norms = {"grad_norm": self.grad_norm, "max_grad_norm": self.max_grad_norm}
        if self.num_skipped and not self.weight:  # there was no gradient, which is not one of 0
            norms = {}
        return {**norms, **skipped, **means(self.logged)}


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """Loss and metrics of a whole segment, as they are reported."""

    loss: float
    metrics: Mapping[str, float]
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the codec has sent and saved; empty without a codec."""
