"""Remember which workers were refused registration and why, and which worker of a run is stalled.

Nothing of this is journaled: workers ask or report again, so the next leader learns it soon.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stratagem.common.base.errors import PermissionDeniedError, StandbyError, StratagemError
from stratagem.common.base.ids import RunId
from stratagem.common.base.text import printable
from stratagem.common.identity.callers import current_caller
from stratagem.coordinator.core.strategy_calls import WHY
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import worker_pb2

# ---- Refused workers ----
#
# The number, the text and the time of the entries are limited, and one caller cannot drive out
# the entries of another. A caller that did not prove to be a worker, where proof is required, is
# never noted: common/rpc/server.py calls this for admitted calls alone.

MAX_REFUSED: Final = 64
FORGET_S: Final = 180.0
"""Seconds after which a refusal is forgotten; a worker that still runs asks again sooner."""
MAX_NAME_CHARS: Final = 80
MAX_REASON_CHARS: Final = 400
MAX_TOLD: Final = 3
"""The most refused workers that the reason of a waiting run names."""


@dataclass(frozen=True, slots=True)
class RefusedRegistration:
    """The last refused registration under the name of a worker that is not registered."""

    worker_id: str
    address: str
    reason: str
    owner: str
    asked_s: float
    num_times: int = 1


class Refusals:
    """The refused registrations, keyed by worker name; `on_change` is called when the sentence
    about them has changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[str, RefusedRegistration] = {}
        self.on_change: Callable[[], None] = lambda: None

    def note(self, request: pb.RegisterWorkerRequest, error: StratagemError) -> None:
        """Record that the registration of an admitted caller was refused."""
        if isinstance(error, StandbyError):
            return  # the leader will say
        caller, name, address = current_caller(), request.worker_id, request.address
        if isinstance(error, PermissionDeniedError) and caller.cert_id is not None:
            name, address = caller.cert_id.name, ""  # the one that it gives is not its own
        name = _clipped(name, MAX_NAME_CHARS) or "without a name"
        previous = self._refused.pop(name, None)
        now = self._refused[name] = RefusedRegistration(
            worker_id=name,
            address=_clipped(address, MAX_NAME_CHARS),
            reason=_clipped(str(error), MAX_REASON_CHARS),
            owner=caller.owner,
            asked_s=self._clock(),
            num_times=1 if previous is None else previous.num_times + 1,
        )
        self._keep_room()
        if previous is None or (previous.address, previous.reason) != (now.address, now.reason):
            self.on_change()

    def forget(self, worker_id: str) -> None:
        """Drop the refusals of a worker that is registered now."""
        if self._refused.pop(worker_id, None) is not None:
            self.on_change()

    def forget_old(self) -> None:
        """Drop the refusals of workers that have not asked for long."""
        since_s = self._clock() - FORGET_S
        old = [name for name, refusal in self._refused.items() if refusal.asked_s <= since_s]
        for name in old:
            del self._refused[name]
        if old:
            self.on_change()

    def messages(self) -> list[pb.RefusedWorker]:
        """Return the refused workers as messages, sorted by name."""
        now_s = self._clock()
        return [
            pb.RefusedWorker(
                worker_id=refusal.worker_id,
                address=refusal.address,
                reason=refusal.reason,
                silent_s=max(0.0, now_s - refusal.asked_s),
                num_times=refusal.num_times,
            )
            for refusal in self._sorted()
        ]

    def sentence(self) -> str:
        """Return the sentence about refused workers for the reason of a waiting run; "" if there
        are none."""
        refusals = self._sorted()
        parts = [
            f"{entry.worker_id}{entry.address and f' at {entry.address}'} asked and was refused: "
            f"{entry.reason}"
            for entry in refusals[:MAX_TOLD]
        ]
        if len(refusals) > MAX_TOLD:
            parts.append(f"{len(refusals) - MAX_TOLD} more were refused, see `stratagem workers`")
        return "; ".join(parts)

    def _sorted(self) -> Sequence[RefusedRegistration]:
        return [self._refused[name] for name in sorted(self._refused)]

    def _keep_room(self) -> None:
        """If there are too many refusals, drop the oldest one of the caller that has the most."""
        if len(self._refused) <= MAX_REFUSED:
            return
        [(owner, _)] = Counter(refusal.owner for refusal in self._refused.values()).most_common(1)
        del self._refused[next(n for n, refusal in self._refused.items() if refusal.owner == owner)]


def _clipped(text: str, max_chars: int) -> str:
    cut = text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
    return printable(cut, is_line=True)


# ---- Stalled plans ----
#
# Workers report the activity of their torch threads. While one worker works alone, the others wait
# for it, and that one is named.


@dataclass(frozen=True, slots=True)
class StalledPlan:
    """A worker's plan that has stalled: it makes no progress; see Stall in worker.proto."""

    worker_id: str
    seconds: float
    activity: str = ""
    place: str = ""
    awaits: str = ""


@dataclass(slots=True)
class StalledPlans:
    """The plans that make no progress now, keyed by run."""

    _of_run: dict[RunId, dict[Hashable, StalledPlan]] = field(default_factory=dict)

    def note(self, run_id: RunId, plan: Hashable, worker_id: str, stall: worker_pb2.Stall) -> bool:
        """Record a worker's report about a plan; without seconds, the plan makes progress or has
        ended. Return True if the plan is stalled."""
        plans = self._of_run.setdefault(run_id, {})
        plans.pop(plan, None)
        is_stalled = 0 < stall.seconds < float("inf")
        if is_stalled:
            details = (stall.activity, stall.place, stall.awaits)
            plans[plan] = StalledPlan(worker_id, stall.seconds, *details)
        if not plans:
            del self._of_run[run_id]
        return is_stalled

    def sentence(self, run_id: RunId, *, is_secret: bool = False) -> str:
        """Return the sentence about a run's stalled plans; "" if there are none. is_secret: the
        sentence names no worker, as nobody may read which workers have plans."""
        plans = self._of_run.get(run_id, {}).values()
        if plans and is_secret:
            longest_s = max(plan.seconds for plan in plans)
            return f"a worker has been at one thing for over {_span(longest_s)}; {WHY}"
        return sentence_of(plans) if plans else ""


def sentence_of(plans: Collection[StalledPlan]) -> str:
    """Return a sentence about the stalled plans of a run; there must be at least one."""
    causes = [plan for plan in plans if not plan.awaits] or plans
    first, num_more = max(causes, key=lambda plan: plan.seconds), len(causes) - 1
    text = f"{first.worker_id} has been at {first.activity} for over {_span(first.seconds)}"
    place = f"{first.place}; " if first.place else ""
    text += f" ({place}its log has the stack)"
    if first.awaits:
        text = f"{first.worker_id} has waited for over {_span(first.seconds)} for {first.awaits}"
    if num_more:
        text += f", and so {'has 1 more worker' if num_more == 1 else f'have {num_more} more'}"
    return text


def _span(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
