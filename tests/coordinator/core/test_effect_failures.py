"""Which failures of which effects are tried again, and the facts that end those that are not."""

import inspect
from typing import Any

import pytest

from stratagem.common.base import errors
from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core.commands import Refusal, Report
from stratagem.coordinator.core.effect_failures import (
    MAX_TRIES,
    STEADY_S,
    TROUBLE,
    FailedTries,
    TryAgain,
    asks_workers,
    ending,
    retry_of,
)
from stratagem.coordinator.core.effects import (
    AccountRound,
    AggregateRound,
    Base,
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
    SecureParty,
    SumRegion,
    TrainClient,
    UploadCommit,
)
from stratagem.coordinator.core.facts import PartyFailed, RunFailed
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, phase, start
from tests.coordinator.runtime.effects import member, segment

pytestmark = pytest.mark.core

ROOT, BASE, A = Party(""), Base(2, 2, Digest("d")), member("a")
OF_ROUND: dict[str, Any] = {"run_id": RUN, "party": ROOT, "round_num": 3}
SECURE = SecureParty(0, ())
ALONE: list[Effect] = [
    AccountRound(**OF_ROUND, candidates=(0,), num_spent=0, clip_norm=1.0, noise_multiplier=None,
                 fingerprint=""),
    CollectUpdate(**OF_ROUND, client=1, digest=Digest("d"), num_samples=1, num_steps=1, loss=0.0,
                  base=BASE),
    SumRegion(**OF_ROUND, client=1, inside=Party("client1"), round_inside=1, base=BASE, accepted=(),
              num_steps=1, loss=0.0),
    JudgeUpdates(**OF_ROUND, base=BASE, accepted=()),
    AggregateRound(**OF_ROUND, base=BASE, accepted=()),
]  # fmt: skip
"""One of each kind whose inputs are all at the coordinator."""
WITH_WORKERS: list[Effect] = [
    Build(RUN, ROOT, 1, A),
    segment(str(RUN), "a", number=3),
    CommitSegment(RUN, ROOT, 3, 10, 1, ((A,),)),
    UploadCommit(RUN, ROOT, 3, 1, BASE, (A,), (Digest("d"),)),
    TrainClient(RUN, ROOT, 1, 3, 1, 2, 1, A, BASE),
    PostKeys(**OF_ROUND, clients=SECURE, may_leave_out=False),
    RouteShares(**OF_ROUND, clients=SECURE, may_leave_out=False),
    AggregateRound(**OF_ROUND, base=BASE, accepted=(), secure=SECURE),
    EvaluateState(RUN, ROOT, 1, BASE, ("test",), (A,)),
    EvaluateState(RUN, ROOT, 1, BASE, ("test",), (A,), client=1),
    MergeMetrics(RUN, ROOT, 3, A, (), ()),
    Release(RUN, frozenset({A})),
]
"""One of each other kind."""
NEVER, LIMITED, ENDLESS = TryAgain.NEVER, TryAgain.LIMITED, TryAgain.ENDLESS
CLASSES: dict[type[BaseException], tuple[TryAgain, TryAgain]] = {
    errors.StratagemError: (LIMITED, LIMITED),
    errors.InvalidInputError: (NEVER, LIMITED),
    errors.OutOfRangeError: (NEVER, LIMITED),
    errors.UnfitModelError: (NEVER, LIMITED),
    errors.LimitError: (NEVER, LIMITED),
    errors.DivergedError: (NEVER, NEVER),
    errors.IntegrityError: (LIMITED, LIMITED),
    errors.StaleError: (ENDLESS, ENDLESS),
    errors.NotFoundError: (ENDLESS, ENDLESS),
    errors.SoleCopyLostError: (ENDLESS, ENDLESS),
    errors.ConflictError: (ENDLESS, ENDLESS),
    errors.AlreadyExistsError: (ENDLESS, ENDLESS),
    errors.WrongStateError: (ENDLESS, ENDLESS),
    errors.UnauthenticatedError: (ENDLESS, ENDLESS),
    errors.PermissionDeniedError: (ENDLESS, ENDLESS),
    errors.RefusedBySiteError: (LIMITED, LIMITED),
    errors.SiteClosedError: (LIMITED, LIMITED),
    errors.BudgetSpentError: (LIMITED, LIMITED),
    errors.KeysLostError: (LIMITED, LIMITED),
    errors.UnavailableError: (ENDLESS, ENDLESS),
    errors.StandbyError: (ENDLESS, ENDLESS),
    errors.InProgressError: (ENDLESS, ENDLESS),
    errors.UserCodeError: (LIMITED, LIMITED),
    errors.RunFailedError: (LIMITED, LIMITED),
    OSError: (ENDLESS, ENDLESS),
    TimeoutError: (ENDLESS, ENDLESS),
    MemoryError: (ENDLESS, ENDLESS),
    TypeError: (LIMITED, LIMITED),
    KeyError: (LIMITED, LIMITED),
    ZeroDivisionError: (LIMITED, LIMITED),
}
"""By class of error: of effects that act alone, and of those that ask workers."""


def of(kind: type[BaseException]) -> BaseException:
    return kind("KeyError", "'x'") if kind is errors.UserCodeError else kind("told")


def failed(effect: Effect, error: BaseException, times: int = 1) -> FailedTries:
    tries = FailedTries()
    for number in range(times):
        tries = tries.and_another(effect, [error], str(error), now_s=100.0 + number)
    return tries


def test_every_effect_and_every_error_has_its_row() -> None:
    kinds = {type(effect) for effect in (*ALONE, *WITH_WORKERS)}
    assert kinds == {*Effect.__args__}
    raised = {kind for _, kind in inspect.getmembers(errors, inspect.isclass)}
    assert {kind for kind in raised if issubclass(kind, errors.StratagemError)} <= CLASSES.keys()


@pytest.mark.parametrize("effect", [*ALONE, *WITH_WORKERS], ids=lambda e: type(e).__name__)
def test_effects_by_errors(effect: Effect) -> None:
    assert asks_workers(effect) == (effect in WITH_WORKERS)
    for kind, expected in CLASSES.items():
        assert retry_of(effect, [of(kind)]) is expected[asks_workers(effect)], kind.__name__


def test_one_of_several_errors_decides() -> None:
    effect, away, wrong = WITH_WORKERS[1], errors.UnavailableError("away"), TypeError("x")
    assert retry_of(effect, [wrong, away]) is ENDLESS  # the outage may have led to it
    assert retry_of(effect, [away, errors.DivergedError("inf"), wrong]) is NEVER
    later = errors.LimitError("too many at once", retry_after_s=2.0)
    assert retry_of(ALONE[0], [later]) is ENDLESS


@pytest.mark.parametrize("effect", [*ALONE, *WITH_WORKERS], ids=lambda e: type(e).__name__)
def test_what_ends_with_an_effect_is_no_more_than_has_to(effect: Effect) -> None:
    for has_ended in (False, True):
        fact = ending(effect, failed(effect, TypeError("x"), MAX_TRIES), has_ended=has_ended)
        expected = "PartyFailed"
        match effect:
            case TrainClient() | CollectUpdate() | SumRegion():
                expected = "UpdateRejected"
            case EvaluateState(client=1):
                expected = "ClientEvaluated"
            case Release():
                expected = "RunReleased"
            case UploadCommit() if has_ended:
                expected = "SoleCopiesLost"
        assert type(fact).__name__ == expected


def test_an_outage_of_any_length_expires_nothing_and_forgives_what_was_before() -> None:
    effect = ALONE[-1]
    tries = failed(effect, TypeError("x"), MAX_TRIES - 1)
    assert not tries.are_too_many
    for number in range(1000):
        tries = tries.and_another(effect, [errors.UnavailableError("away")], "away", 200.0 + number)
        assert not tries.are_too_many
    assert (tries.num, tries.since_s) == (MAX_TRIES - 1 + 1000, 100.0)
    tries = tries.and_another(effect, [TypeError("x")], "x", 2000.0)
    assert not tries.are_too_many


def test_a_try_that_went_well_for_long_has_met_another_failure() -> None:
    effect = WITH_WORKERS[1]
    tries = failed(effect, TypeError("x"), MAX_TRIES - 1)
    assert tries.and_another(effect, [TypeError("x")], "x", 0.0, STEADY_S).are_too_many
    assert not tries.and_another(effect, [TypeError("x")], "x", 0.0, 2 * STEADY_S).are_too_many


def test_watchers_are_told_when_a_failure_lasts_twice_as_long_and_of_another_one() -> None:
    effect, tries, news = ALONE[-1], FailedTries(), []
    for number in range(1, 50):
        tries = tries.and_another(effect, [errors.UnavailableError("a")], "a", float(number))
        news += [number] if tries.is_news else []
    assert news == [TROUBLE, 2 * TROUBLE, 4 * TROUBLE, 8 * TROUBLE]
    assert tries.and_another(effect, [errors.UnavailableError("b")], "b", 50.0).is_news


def test_reasons_name_the_place_the_effect_and_the_remedy() -> None:
    told = errors.DivergedError(
        "the mean leads 'w' beyond the range of float32; lower optimizer.lr"
    )
    fact = ending(ALONE[-1], failed(ALONE[-1], told), has_ended=False)
    assert fact == PartyFailed(party=ROOT, reason=f"round 3: {told}", cause=Cause.NOT_FINITE)
    fact = ending(ALONE[-1], failed(ALONE[-1], TypeError("x"), MAX_TRIES), has_ended=False)
    assert isinstance(fact, PartyFailed)
    assert fact.reason == (
        f"round 3: AggregateRound has failed {MAX_TRIES} times in a row and is given up: x; that "
        "is a defect of Stratagem and not of the job, and the coordinator's log has its traceback; "
        f"once it is mended, stratagem resume {RUN} goes on"
    )
    damaged = failed(ALONE[-1], errors.IntegrityError("it is damaged"), MAX_TRIES)
    fact = ending(ALONE[-1], damaged, has_ended=False)
    assert isinstance(fact, PartyFailed)
    assert "is given up: it is damaged; once it is mended, stratagem resume" in fact.reason


def test_a_round_that_diverges_ends_its_run_once() -> None:
    simulation = start(job_text(FEDERATED), *"ab")
    while not (due := [e for e in pending(simulation.state) if isinstance(e, AggregateRound)]):
        simulation.tell(simulation.queue.popleft())
    told = errors.DivergedError("beyond the range of float32")
    fact = ending(due[0], failed(due[0], told), has_ended=False)
    simulation.tell(Report(RUN, fact))
    assert due[0] not in pending(simulation.state)
    assert phase(simulation) is RunPhase.FAILED
    assert [fact.reason for fact in simulation.facts(RunFailed)] == [f"round 1: {told}"]
    assert isinstance(simulation.tell(Report(RUN, fact)), Refusal)
