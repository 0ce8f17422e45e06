"""The report that a training step of any kind returns, and sums of reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stratagem.worker.engine.forward_backward import LoggedSums, added, means


@dataclass(frozen=True, slots=True)
class PartReport:
    """The step's numbers of one node or stage, which only the member that owns it knows."""

    party: str
    """The name of the node or stage in its party, such as "node/3"."""
    exact: Mapping[str, float] = field(default_factory=dict)
    """Numbers with the same bits whichever member owns the part, keyed by series."""
    observed: Mapping[str, float] = field(default_factory=dict)
    """Numbers that depend on clocks and machines, keyed by series."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of one finished step. `step` counts applied steps, including this one."""

    step: int
    loss: float
    weight: float
    """Number of rows or tokens that the step learned from; 0 if it was skipped."""
    num_rows: int
    stop: bool
    grad_norm: float
    """2-norm of the whole gradient before clipping; of several nodes, the largest."""
    num_skipped: int = 0
    """Number of nodes whose step was skipped as not finite; 0 or 1 if there are no nodes."""
    phase: str = ""
    """Name of the training phase, if any. Predicted steps have the last exact loss, weight 0."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers about the step, besides the loss."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rates of the step's update, keyed by series: see
    stratagem.worker.engine.apply_step."""
    logged: LoggedSums = field(default_factory=dict)
    """Sums of the values that the step function has logged."""
    news: Sequence[str] = field(default=(), compare=False)
    """Sentences for the run's log."""
    is_end: bool = False
    """True if no step was made: all members end the training before this step, as on_step asked."""
    answered: Mapping[str, float] = field(default_factory=dict)
    """Values logged by on_step for the previous step, which all members learn with this one."""
    exchange_wait_s: float = field(default=0.0, compare=False)
    """Seconds spent waiting for other members after this member's own passes; under a pipeline, for
    the inputs of its stages."""
    parts: Sequence[PartReport] = field(default=(), compare=False)
    """The reports of this member's nodes or stages."""
    actions: Callable[[], Sequence[PartReport]] = field(default=tuple, compare=False)
    """Function that returns the timeline of this member's stages in the step."""
    is_torn: bool = field(default=False, compare=False)
    """True if the step is applied here but the other members' updated parameters did not arrive:
    the remaining members must form a new exchange before the next step."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Numbers measured in this step over all nodes together, keyed by series."""

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the plain values from which on_step's view of the step is made."""
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
        """Return the metrics that are shown while the run is in progress; equal on all members."""
        return {**self.metrics, **means(self.logged)}


def mean_loss(loss_sum: float, weight: float, num_skipped: float) -> float:
    """Return the mean loss of a segment's steps: 0 if there was none, NaN if all were skipped,
    since 0 would look like the best loss."""
    if weight:
        return loss_sum / weight
    return math.nan if num_skipped else 0.0


def end_of(step: int) -> StepReport:
    """Return a report that says that the training ends after `step` steps, without another step."""
    return StepReport(step, 0.0, 0.0, 0, stop=True, grad_norm=0.0, is_end=True)


@dataclass(slots=True)
class Tally:
    """Sums over the steps of one segment; sent along with a state copied within the segment."""

    segment: int = -1
    weight: float = 0.0
    loss_sum: float = 0.0
    num_rows: int = 0
    grad_norm: float = 0.0
    """2-norm of the last applied step's whole gradient, before clipping."""
    max_grad_norm: float = 0.0
    num_skipped: int = 0
    """Number of steps skipped because they were not finite; under gossip, of each node."""
    logged: LoggedSums = field(default_factory=dict)
    latest: dict[str, Any] = field(default_factory=dict)
    """on_step's view of the latest exact step; empty if the job has no on_step."""
    shown: dict[str, float] = field(default_factory=dict)
    """The latest value of each name logged by on_step, as far as this member knows: the values for
    the latest step are only known to the member that called on_step."""

    @property
    def loss(self) -> float:
        """Mean loss; 0 if there was no step, NaN if all were skipped."""
        return mean_loss(self.loss_sum, self.weight, self.num_skipped)

    def add(self, report: StepReport) -> None:
        """Add the numbers of a finished step to the sums."""
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
        """Return the segment's metrics besides the loss. may_skip: include the skipped steps."""
        skipped = {"skipped_steps": float(self.num_skipped)} if may_skip else {}
        norms = {"grad_norm": self.grad_norm, "max_grad_norm": self.max_grad_norm}
        if self.num_skipped and not self.weight:  # there was no gradient, which is not one of 0
            norms = {}
        return {**norms, **skipped, **means(self.logged)}


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """The loss and metrics of a whole segment, for its report."""

    loss: float
    metrics: Mapping[str, float]
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Number of bytes that the codec has sent and saved; empty without a codec."""
