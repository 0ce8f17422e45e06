"""The report that a training step of any kind returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    micro_batch_losses: tuple[float, ...] = field(default=(), compare=False)
    """Mean losses, not weighted, of the micro-batches of this member's shards: in a pipeline the
    last stage sends them to all ranks."""
    exchange_wait_s: float = field(default=0.0, compare=False)
    """From the end of this member's own passes until the sums of all were here."""

    @property
    def progress_metrics(self) -> dict[str, float]:
        """The metrics that are shown while the run is in progress."""
        losses = self.micro_batch_losses
        if len(losses) < 2:
            return dict(self.metrics)
        spread = {"micro_batch_loss_min": min(losses), "micro_batch_loss_max": max(losses)}
        return {**self.metrics, **spread}
