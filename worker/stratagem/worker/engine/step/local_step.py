"""One optimizer step of a model that is not shared: a gossip node's, or a federated client's.

Its window of micro-batches is one transaction: what raises, or is not finite, leaves parameters,
optimizer and buffers as they were. Must not know nodes, clients and rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stratagem.worker.engine.optim.finite_gradients import StepSummary, after_hook, summarize
from stratagem.worker.engine.step.apply_step import apply_step
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.forward_backward import Counted, Rows, Window
from stratagem.worker.engine.step.logged_sums import LoggedSums
from stratagem.worker.engine.step.turns import StepTurn, logged_of


@dataclass(frozen=True, slots=True)
class LocalReport:
    """The outcome of a local step. grad_norm: 2-norm of the whole gradient before clipping.
    learning_rates: by series."""

    counted: Counted
    grad_norm: float
    num_skipped: int
    """1 where loss or gradient was not finite and nothing was changed; of turns, how many."""
    learning_rates: Mapping[str, float]

    @property
    def is_skipped(self) -> bool:
        """True if any of it was skipped: the step then has no part in sums."""
        return self.num_skipped > 0


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Does the steps of one model. Used by one thread."""

    turn: StepTurn
    must_divide: bool
    """Whether the gradient is that of the mean over all rows, not of the sum."""
    numerics: int
    """Version of the rules that decide the bits; see stratagem.common.numerics.rules."""
    callbacks: Callbacks
    protected: Callable[[Rows, Window], Counted] | None = None
    """Makes gradients in place of the turn's passes, where rows are protected."""

    def run(
        self,
        rows: Rows,
        window: Window,
        *,
        lr_factor: float,
        step: int,
        number: int | None = None,
        pull: Callable[[], None] = lambda: None,
    ) -> LocalReport:
        """Makes one step over these rows.

        lr_factor: of all learning rates. step: from 1, for callbacks. number: the same where error
        messages are to name it. pull: may add to the mean gradient.
        """
        policy = self.turn.policy
        policy.begin()
        try:
            if self.protected is None:
                counted = self.turn.passes.add_mean(rows, window, must_divide=self.must_divide)
            else:
                counted = self.protected(rows, window)
            pull()
            summary = after_hook(
                self._summary(counted),
                partial(self._call_hook, rows, window, step)
                if self.callbacks.takes_gradients
                else None,
                partial(self._summary, counted),
            )
        except BaseException:
            policy.undo()
            raise
        is_applied, rates = apply_step(
            summary, policy, lr_factor=lr_factor, activity=rows.activity, number=number
        )
        return LocalReport(counted, summary.norm.item(), int(not is_applied), rates)

    def _summary(self, counted: Counted) -> StepSummary:
        grads = [param.grad for param in self.turn.policy.params if param.grad is not None]
        return summarize(counted.loss, counted.weight, grads, self.numerics)

    def _call_hook(self, rows: Rows, window: Window, step: int) -> None:
        """Has the user's code change the gradient that is about to be applied."""
        key, randomness = window.key(0), self.turn.passes.randomness
        self.callbacks.take_gradients(self.turn.params, step, key, randomness, rows.activity)


def whole_local_step(
    turns: Sequence[StepTurn], reports: Sequence[LocalReport], num_rows: int
) -> LocalReport:
    """Returns the report of a step of these turns: its loss is the sum of theirs, a mean over
    rows."""
    if len(turns) == 1:
        return reports[0]
    logged: LoggedSums = {}
    for turn, report in zip(turns, reports, strict=True):
        own = report.counted
        logged = {**logged, **logged_of(turn, own.loss, num_rows, own.logged)}
    loss = sum(report.counted.loss for report in reports)
    return LocalReport(
        Counted(loss * num_rows, num_rows, logged=logged),
        max(report.grad_norm for report in reports),
        sum(report.num_skipped for report in reports),
        {name: rate for report in reports for name, rate in report.learning_rates.items()},
    )
