"""One optimizer step of a model that is not shared: a gossip node's, or a federated client's.

Its window of micro-batches is one transaction: what raises, or is not finite, leaves parameters,
optimizer and buffers as they were. Must not know nodes, clients and rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stratagem.worker.engine.optim.finite_gradients import summarize
from stratagem.worker.engine.step.apply_step import StepPolicy, apply_step
from stratagem.worker.engine.step.forward_backward import Counted, Passes, Rows, Window


@dataclass(frozen=True, slots=True)
class LocalReport:
    """The outcome of a local step. grad_norm: 2-norm of the whole gradient before clipping."""

    counted: Counted
    grad_norm: float
    is_skipped: bool


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Does the steps of one model. Used by one thread."""

    policy: StepPolicy
    passes: Passes
    must_divide: bool
    """Whether the gradient is that of the mean over all rows, not of the sum."""
    numerics: int
    """Version of the rules that decide the bits; see stratagem.common.numerics.numerics_rules."""

    def run(
        self,
        rows: Rows,
        window: Window,
        *,
        lr_factor: float,
        number: int | None = None,
        pull: Callable[[], None] = lambda: None,
    ) -> LocalReport:
        """Makes one step over these rows.

        lr_factor: of all learning rates. number: the step's from 1, for error messages. pull: may
        add to the mean gradient.
        """
        policy = self.policy
        policy.begin()
        try:
            counted = self.passes.add_mean(rows, window, must_divide=self.must_divide)
            pull()
            grads = [param.grad for param in policy.params if param.grad is not None]
            summary = summarize(counted.loss, counted.weight, grads, self.numerics)
        except BaseException:
            policy.undo()
            raise
        is_applied = apply_step(
            summary, policy, lr_factor=lr_factor, activity=rows.activity, number=number
        )
        return LocalReport(counted, summary.norm.item(), not is_applied)
