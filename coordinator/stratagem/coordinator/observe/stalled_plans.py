"""Says which worker of a run stays at one thing, by what the workers report of their torch threads.

While one of them is at something of its own, the others wait for it, and that one is named. A
worker reports again to the next coordinator, so nothing of this is kept.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.secret_draws import WHY
from stratagem.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class StalledPlan:
    """A plan that does not come on; see Stall in worker.proto."""

    worker_id: str
    seconds: float
    activity: str = ""
    place: str = ""
    awaits: str = ""


@dataclass(slots=True)
class StalledPlans:
    """The plans that do not come on now, by run."""

    _of_run: dict[RunId, dict[Hashable, StalledPlan]] = field(default_factory=dict)

    def note(self, run_id: RunId, plan: Hashable, worker_id: str, stall: worker_pb2.Stall) -> bool:
        """Take in what a worker reports of a plan; without seconds it comes on, or has ended.
        Return whether it does not."""
        plans = self._of_run.setdefault(run_id, {})
        plans.pop(plan, None)
        is_stalled = 0 < stall.seconds < float("inf")
        if is_stalled:
            told = (stall.activity, stall.place, stall.awaits)
            plans[plan] = StalledPlan(worker_id, stall.seconds, *told)
        if not plans:
            del self._of_run[run_id]
        return is_stalled

    def sentence(self, run_id: RunId, *, is_secret: bool = False) -> str:
        """Return the sentence about a run, "" where all plans come on. is_secret: nobody may read
        who has a plan of it."""
        plans = self._of_run.get(run_id, {}).values()
        if plans and is_secret:
            longest_s = max(plan.seconds for plan in plans)
            return f"a worker has been at one thing for over {_span(longest_s)}; {WHY}"
        return sentence_of(plans) if plans else ""


def sentence_of(plans: Collection[StalledPlan]) -> str:
    """Return the sentence about plans of a run that do not come on, of which there are some."""
    own = [plan for plan in plans if not plan.awaits] or plans
    first, num_more = max(own, key=lambda plan: plan.seconds), len(own) - 1
    told = f"{first.worker_id} has been at {first.activity} for over {_span(first.seconds)}"
    place = f"{first.place}; " if first.place else ""
    told += f" ({place}its log has the stack)"
    if first.awaits:
        told = f"{first.worker_id} has waited for over {_span(first.seconds)} for {first.awaits}"
    if num_more:
        told += f", and so {'has 1 more worker' if num_more == 1 else f'have {num_more} more'}"
    return told


def _span(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
