"""Shows the steps of a segment to the user's on_step, on the member that owns the first shard.

What it says of a step, all members learn with the next one. And every member keeps in its tally
what the latest step was, so one that takes over from a lost member shows that step again: what it
had said of it would be lost otherwise. Runs in the torch thread.
"""

from typing import Final

from stratagem.common.base.errors import UserCodeError
from stratagem.common.strategy import Custom, Federated
from stratagem.worker.engine import StepReport
from stratagem.worker.engine.step.callbacks import Callbacks
from stratagem.worker.engine.step.step_answer import NO_ANSWER, StepAnswer
from stratagem.worker.engine.step.step_view import StepView
from stratagem.worker.phases import TrainingPhase
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView

STOPPED: Final = "on_step has called view.stop()"


class StepListener:
    """The calls of on_step by one member under one view; none where it owns other shards."""

    def __init__(self, work: ExecutionContext, view: MemberView, callbacks: Callbacks) -> None:
        self._work, self._callbacks = work, callbacks
        self._is_mine = view.rank == 0
        tally = work.holding.tally
        if tally.latest and work.holding.shown_step != tally.latest["step"]:
            self._show()

    @property
    def answer(self) -> StepAnswer:
        """What on_step has said to this member of the latest step."""
        return self._work.holding.answer if self._is_mine else NO_ANSWER

    def after(self, report: StepReport) -> None:
        """Takes in a step that was done; a predicted one has nothing to show."""
        if self._callbacks.sees_steps and report.phase != TrainingPhase.PREDICT:
            self._work.holding.tally.latest = report.numbers
            self._show()

    def _show(self) -> None:
        if not self._is_mine:
            return
        holding = self._work.holding
        seen = StepView(**holding.tally.latest)
        self._callbacks.saw_step(seen)
        if seen.wants_end:
            check_may_end(self._work, f"on_step of training step {seen.step}")
        holding.shown_step = seen.step
        holding.answer = StepAnswer(seen.logged, seen.wants_end)
        holding.tally.shown = {**holding.tally.shown, **seen.logged}


def check_may_end(work: ExecutionContext, activity: str) -> None:
    """Raise where the end of this party would not be that of the run."""
    text = ""
    if work.key.party:
        text = "is not possible in a part of a run, such as a member of a population"
    if isinstance(work.job.strategy, Federated):
        text = (
            "cannot go with strategy.type Federated, whose rounds go on while a state is evaluated;"
            " evaluation.stop ends such a run"
        )
    if work.job.only_evaluates:
        text = "is not possible where execution.gradient is None: nothing is trained"
    if isinstance(work.job.strategy, Custom):
        text = "cannot go with strategy.type Custom, which decides itself when a run ends"
    if text:
        raise UserCodeError("ValueError", f"view.stop() {text}", activity=activity)
