"""Decide whether a failed effect is retried, and which fact ends an effect that is given up.

A failure that the same inputs always give is not retried. A failure caused by an outage (of a
worker, a disk, a store) is retried without limit, however long the outage takes. Anything else is
retried a limited number of times: it may come from a worker that answers nonsense until it is
replaced, or from a defect, which would hold its workers forever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from stratagem.common.base.errors import (
    ConflictError,
    DivergedError,
    IntegrityError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    StaleError,
    StratagemError,
    UnauthenticatedError,
    UnavailableError,
)
from stratagem.coordinator.core.effects import (
    AccountRound,
    AggregateRound,
    Build,
    CollectUpdate,
    CommitSegment,
    Effect,
    EvaluateState,
    JudgeUpdates,
    MergeMetrics,
    PostKeys,
    Release,
    RouteShares,
    RunSegment,
    SumRegion,
    TrainClient,
    UploadCommit,
)
from stratagem.coordinator.core.facts import (
    ClientEvaluated,
    Fact,
    PartyFailed,
    RunReleased,
    SoleCopiesLost,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause

MAX_TRIES: Final = 20
"""Tries of an effect that may never succeed: about a minute, with the backoff between them."""
STEADY_S: Final = 60.0
"""A try that runs longer than this before it fails starts the count of limited tries again."""
TROUBLE: Final = 6
"""Consecutive failed tries, a second or two in all, after which watchers of the run are told."""

_MENDABLE: Final = (
    *(UnavailableError, StaleError, ConflictError, NotFoundError),
    *(UnauthenticatedError, PermissionDeniedError, OSError, MemoryError),
)
"""Errors that may go away: a process, disk or store is absent, full or refuses; or calls raced."""
_OF_THE_INPUTS: Final = (InvalidInputError, LimitError)
"""Errors of wrong inputs; if a worker has sent the inputs, another worker may send right ones."""


class TryAgain(StrEnum):
    """The number of retries that a failed effect gets: none, some, or without end."""

    NEVER = "never"
    LIMITED = "limited"
    ENDLESS = "endless"


def retry_of(effect: Effect, errors: Sequence[BaseException]) -> TryAgain:
    """Return the retries that an effect gets after one try has failed with all these errors."""
    retries = {_retry_of_one(effect, error) for error in errors}
    order = (TryAgain.NEVER, TryAgain.ENDLESS, TryAgain.LIMITED)
    return next((retry for retry in order if retry in retries), TryAgain.LIMITED)


def _retry_of_one(effect: Effect, error: BaseException) -> TryAgain:
    if isinstance(error, DivergedError):
        return TryAgain.NEVER
    if isinstance(error, LimitError) and error.retry_after_s is not None:
        return TryAgain.ENDLESS
    if isinstance(error, _OF_THE_INPUTS) and not asks_workers(effect):
        return TryAgain.NEVER
    is_mendable = isinstance(error, _MENDABLE) and not isinstance(error, IntegrityError)
    return TryAgain.ENDLESS if is_mendable else TryAgain.LIMITED


def asks_workers(effect: Effect) -> bool:
    """Return True if the effect needs workers, and not only inputs stored at the coordinator."""
    match effect:
        case AccountRound() | CollectUpdate() | SumRegion() | JudgeUpdates():
            return False
        case AggregateRound():
            return effect.secure is not None
        case Build() | RunSegment() | CommitSegment() | UploadCommit() | TrainClient():
            return True
        case PostKeys() | RouteShares() | EvaluateState() | MergeMetrics() | Release():
            return True
        case _:
            assert_never(effect)


@dataclass(frozen=True, slots=True)
class FailedTries:
    """The failed tries of an effect since its last success."""

    num: int = 0
    num_limited: int = 0
    """Consecutive tries that count toward MAX_TRIES."""
    since_s: float = 0.0
    """Wall time of the first failure."""
    next_s: float = 0.0
    """Wall time of the next try."""
    retry: TryAgain = TryAgain.ENDLESS
    """The retries that the newest failure allows."""
    reason: str = ""
    """The reason of the newest failure, for people."""
    has_diverged: bool = False
    is_defect: bool = False
    """True if the newest failure is an exception that nobody raises on purpose."""
    is_news: bool = False
    """True if watchers must be told: the reason is new, or the number of failures has doubled."""

    def and_another(
        self,
        effect: Effect,
        errors: Sequence[BaseException],
        reason: str,
        now_s: float,
        lasted_s: float = 0.0,
    ) -> "FailedTries":
        """Return the failed tries with one more, which failed now after lasted_s seconds."""
        retry, num = retry_of(effect, errors), self.num + 1
        num_limited = 0 if lasted_s > STEADY_S else self.num_limited
        doublings, rest = divmod(num, TROUBLE)
        has_doubled = not rest and doublings & (doublings - 1) == 0
        return FailedTries(
            num=num,
            num_limited=0 if retry is TryAgain.ENDLESS else num_limited + 1,
            since_s=self.since_s if self.num else now_s,
            retry=retry,
            reason=reason,
            has_diverged=any(isinstance(error, DivergedError) for error in errors),
            is_defect=not all(isinstance(error, StratagemError | OSError) for error in errors),
            is_news=num >= TROUBLE and (has_doubled or reason != self.reason),
        )

    @property
    def are_too_many(self) -> bool:
        """Return True if the effect must be given up."""
        return self.retry is TryAgain.NEVER or self.num_limited >= MAX_TRIES


def ending(effect: Effect, tries: FailedTries, *, has_ended: bool) -> Fact:
    """Return the fact that ends an effect that is given up, failing as little as possible: a
    client, a party, or the run. has_ended: the run has ended."""
    reason = ending_reason(effect, tries)
    cause = Cause.NOT_FINITE if tries.has_diverged else Cause.EXCEPTION
    match effect:
        case TrainClient() | CollectUpdate() | SumRegion():
            return UpdateRejected(
                party=effect.party,
                round_num=effect.round_num,
                client=effect.client,
                reason=reason,
                cause=cause,
                attempt=effect.attempt if isinstance(effect, TrainClient) else 0,
            )
        case EvaluateState(client=int(client)):
            segment = effect.base.segment
            return ClientEvaluated(
                party=effect.party, segment=segment, client=client, sums={}, reason=reason
            )
        case UploadCommit() if has_ended:
            return SoleCopiesLost(party=effect.party, segment=effect.segment, reason=reason)
        case Release():  # workers forget the run when they next ask about it
            return RunReleased()
        case _:
            return PartyFailed(party=effect.party, reason=reason, cause=cause)


def ending_reason(effect: Effect, tries: FailedTries) -> str:
    """Return a sentence that says why an effect is given up."""
    kind, where = type(effect).__name__, _where(effect)
    if tries.retry is TryAgain.NEVER:
        return f"{where or kind}: {tries.reason}"
    said = f"{where}: {kind}" if where else kind
    said = f"{said} has failed {tries.num_limited} times in a row and is given up: {tries.reason}"
    if tries.is_defect:
        said += (
            "; that is a defect of Stratagem and not of the job, and the coordinator's log has its "
            "traceback"
        )
    return f"{said}; once it is mended, stratagem resume {effect.run_id} goes on"


def _where(effect: Effect) -> str:
    for name, attribute in (("round", "round_num"), ("segment", "segment")):
        number = getattr(effect, attribute, None)
        if number is not None:
            return f"{name} {number}"
    return ""
