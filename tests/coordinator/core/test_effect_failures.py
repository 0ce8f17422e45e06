"""Which failures of which effects are tried again, and the facts that end those that are not."""

import inspect
from typing import Any

import pytest

from stratagem.common.base import errors
from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core import effects as e
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
from stratagem.coordinator.core.facts import ROOT, PartyFailed, RunFailed
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, start
from tests.coordinator.runtime.effects import member, segment

pytestmark = pytest.mark.core


BASE, A = e.Base(2, 2, Digest("d")), member("a")
OF_ROUND: dict[str, Any] = {"run_id": RUN, "party": ROOT, "round_num": 3}
TOLD: dict[str, Any] = {"base": BASE, "num_steps": 1, "loss": 0.0}
SECURE = e.SecureParty(0, ())
ACCOUNT: dict[str, Any] = {"num_spent": 0, "clip_norm": 1.0, "noise_multiplier": None}
ALONE: list[e.Effect] = [
    e.AccountRound(**OF_ROUND, **ACCOUNT, candidates=(0,), fingerprint=""),
    e.CollectUpdate(**OF_ROUND, **TOLD, client=1, digest=Digest("d"), num_samples=1),
    e.SumRegion(**OF_ROUND, **TOLD, client=1, inside=Party("client1"), round_inside=1, accepted=()),
    e.JudgeUpdates(**OF_ROUND, base=BASE, accepted=()),
    e.AggregateRound(**OF_ROUND, base=BASE, accepted=()),
]
"""One of each kind whose inputs are all at the coordinator."""
WITH_WORKERS: list[e.Effect] = [
    e.Build(RUN, ROOT, 1, A),
    segment(str(RUN), "a", number=3),
    e.CommitSegment(RUN, ROOT, 3, 10, 1, ((A,),)),
    e.UploadCommit(RUN, ROOT, 3, 1, BASE, (A,), (Digest("d"),)),
    e.TrainClient(RUN, ROOT, 1, 3, 1, 2, 1, A, BASE),
    e.PostKeys(**OF_ROUND, clients=SECURE, may_leave_out=False),
    e.RouteShares(**OF_ROUND, clients=SECURE, may_leave_out=False),
    e.AggregateRound(**OF_ROUND, base=BASE, accepted=(), secure=SECURE),
    e.EvaluateState(RUN, ROOT, 1, BASE, ("test",), (A,)),
    e.EvaluateState(RUN, ROOT, 1, BASE, ("test",), (A,), client=1),
    e.MergeMetrics(RUN, ROOT, 3, A, (), ()),
    e.Release(RUN, frozenset({A})),
]
"""One of each other kind."""
NEVER, LIMITED, ENDLESS = TryAgain.NEVER, TryAgain.LIMITED, TryAgain.ENDLESS
CLASSES: dict[tuple[TryAgain, TryAgain], list[type[BaseException]]] = {
    (NEVER, NEVER): [errors.DivergedError],
    (NEVER, LIMITED): [
        *(errors.InvalidInputError, errors.OutOfRangeError, errors.UnfitModelError),
        errors.LimitError,
    ],
    (LIMITED, LIMITED): [
        *(errors.StratagemError, errors.IntegrityError, errors.RefusedBySiteError),
        *(errors.SiteClosedError, errors.BudgetSpentError, errors.KeysLostError),
        *(errors.UserCodeError, errors.RunFailedError, TypeError, KeyError, ZeroDivisionError),
    ],
    (ENDLESS, ENDLESS): [
        *(errors.StaleError, errors.NotFoundError, errors.SoleCopyLostError, errors.ConflictError),
        *(errors.AlreadyExistsError, errors.WrongStateError, errors.UnauthenticatedError),
        *(errors.PermissionDeniedError, errors.UnavailableError, errors.StandbyError),
        *(errors.InProgressError, OSError, TimeoutError, MemoryError),
    ],
}
"""By class of error: of effects that act alone, and of those that ask workers."""


def of(kind: type[BaseException]) -> BaseException:
    return kind("KeyError", "'x'") if kind is errors.UserCodeError else kind("told")


def failed(effect: e.Effect, error: BaseException, times: int = 1) -> FailedTries:
    tries = FailedTries()
    for number in range(times):
        tries = tries.and_another(effect, [error], str(error), now_s=100.0 + number)
    return tries


def test_every_effect_and_every_error_has_its_row() -> None:
    assert {type(effect) for effect in (*ALONE, *WITH_WORKERS)} == {*e.Effect.__args__}
    raised = {kind for _, kind in inspect.getmembers(errors, inspect.isclass)}
    known = {kind for kinds in CLASSES.values() for kind in kinds}
    assert {kind for kind in raised if issubclass(kind, errors.StratagemError)} <= known


@pytest.mark.parametrize("effect", [*ALONE, *WITH_WORKERS], ids=lambda each: type(each).__name__)
def test_effects_by_errors(effect: e.Effect) -> None:
    """And what ends with an effect is no more than has to."""
    assert asks_workers(effect) == (effect in WITH_WORKERS)
    for expected, kinds in CLASSES.items():
        for kind in kinds:
            assert retry_of(effect, [of(kind)]) is expected[asks_workers(effect)], kind.__name__
    for has_ended in (False, True):
        fact = ending(effect, failed(effect, TypeError("x"), MAX_TRIES), has_ended=has_ended)
        ends = "PartyFailed"
        match effect:
            case e.TrainClient() | e.CollectUpdate() | e.SumRegion():
                ends = "UpdateRejected"
            case e.EvaluateState(client=1):
                ends = "ClientEvaluated"
            case e.Release():
                ends = "RunReleased"
            case e.UploadCommit() if has_ended:
                ends = "SoleCopiesLost"
        assert type(fact).__name__ == ends


def test_one_of_several_errors_decides() -> None:
    effect, away, wrong = WITH_WORKERS[1], errors.UnavailableError("away"), TypeError("x")
    assert retry_of(effect, [wrong, away]) is ENDLESS  # the outage may have led to it
    assert retry_of(effect, [away, errors.DivergedError("inf"), wrong]) is NEVER
    later = errors.LimitError("too many at once", retry_after_s=2.0)
    assert retry_of(ALONE[0], [later]) is ENDLESS


def test_an_outage_and_a_try_that_went_well_for_long_forgive_what_was_before() -> None:
    effect = ALONE[-1]
    tries = failed(effect, TypeError("x"), MAX_TRIES - 1)
    assert not tries.are_too_many
    for number in range(1000):
        tries = tries.and_another(effect, [errors.UnavailableError("away")], "away", 200.0 + number)
        assert not tries.are_too_many
    assert (tries.num, tries.since_s) == (MAX_TRIES - 1 + 1000, 100.0)
    tries = tries.and_another(effect, [TypeError("x")], "x", 2000.0)
    assert not tries.are_too_many
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


def reason(effect: e.Effect, error: BaseException, times: int = MAX_TRIES) -> str:
    fact = ending(effect, failed(effect, error, times), has_ended=False)
    assert isinstance(fact, PartyFailed)
    return fact.reason


def test_reasons_name_the_place_the_effect_and_the_remedy() -> None:
    told = errors.DivergedError(
        "the mean leads 'w' beyond the range of float32; lower optimizer.lr"
    )
    fact = ending(ALONE[-1], failed(ALONE[-1], told), has_ended=False)
    assert fact == PartyFailed(party=ROOT, reason=f"round 3: {told}", cause=Cause.NOT_FINITE)
    assert reason(ALONE[-1], TypeError("x")) == (
        f"round 3: AggregateRound has failed {MAX_TRIES} times in a row and is given up: x; that "
        "is a defect of Stratagem and not of the job, and the coordinator's log has its traceback; "
        f"once it is mended, stratagem resume {RUN} goes on"
    )
    damaged = reason(ALONE[-1], errors.IntegrityError("it is damaged"))
    assert "is given up: it is damaged; once it is mended, stratagem resume" in damaged


def test_a_round_that_diverges_ends_its_run_once() -> None:
    simulation = start(job_text(FEDERATED), *"ab")
    simulation.until_due(e.AggregateRound)
    due = simulation.due_one(e.AggregateRound)
    told = errors.DivergedError("beyond the range of float32")
    fact = ending(due, failed(due, told), has_ended=False)
    simulation.report(fact)
    assert due not in pending(simulation.state)
    assert simulation.phase is RunPhase.FAILED
    assert simulation.fact(RunFailed).reason == f"round 1: {told}"
    simulation.refusal(fact)
