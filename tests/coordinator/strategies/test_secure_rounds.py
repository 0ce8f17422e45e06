"""Secure rounds in the pure core: what is exchanged before training, who is left out, new keys."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import CancelRun, LoseWorker, Refusal, Report, ResumeRun
from stratagem.coordinator.core.effects import AggregateRound, PostKeys, RouteShares
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientsSelected,
    Fact,
    KeysPosted,
    LeftOut,
    RoundClosed,
    RoundRestarted,
    RunFailed,
    SharesRouted,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, digest, do, member, phase, start
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core


def secure(num_clients: int = 4, **options: Any) -> dict[str, Any]:
    section = options.pop("secure_aggregation", {})
    return {
        **FEDERATED,
        "num_clients": num_clients,
        "options": {"secure_aggregation": section, **options},
    }


def due(simulation: Simulation, kind: type[Any]) -> Any:
    found = [effect for effect in pending(simulation.state) if isinstance(effect, kind)]
    return found[0] if found else None


def posted(simulation: Simulation, without: tuple[LeftOut, ...] = (), **fields: Any) -> Fact:
    (fact,) = do(due(simulation, PostKeys))
    gone = {each.client for each in without}
    assert isinstance(fact, KeysPosted)
    clients = tuple(client for client in fact.clients if client not in gone)
    return fact.model_copy(update={"clients": clients, "left_out": without, **fields})


def routed(simulation: Simulation, without: tuple[LeftOut, ...] = ()) -> Fact:
    (fact,) = do(due(simulation, RouteShares))
    gone = {each.client for each in without}
    assert isinstance(fact, SharesRouted)
    clients = tuple(client for client in fact.clients if client not in gone)
    return fact.model_copy(update={"clients": clients, "left_out": without})


def tell(simulation: Simulation, *facts: Fact) -> None:
    for fact in facts:
        assert not isinstance(simulation.tell(Report(RUN, fact)), Refusal)
    simulation.queue.clear()


def exchanged(simulation: Simulation) -> Simulation:
    """With keys and shares of all, and nobody trained."""
    tell(simulation, posted(simulation))
    tell(simulation, routed(simulation))
    return simulation


def update(client: int, attempt: int = 0) -> UpdateReceived:
    return UpdateReceived(
        party=ROOT,
        round_num=1,
        client=client,
        digest=digest(f"update{client}"),
        num_samples=1,
        loss=float("nan"),
        seconds=0.0,
        num_steps=1,
        attempt=attempt,
    )


def left_out(client: int, cause: Cause) -> LeftOut:
    return LeftOut(client=client, reason=cause.value, cause=cause)


def lost_keys(client: int, attempt: int = 0, cause: Cause = Cause.KEYS_LOST) -> UpdateRejected:
    return UpdateRejected(
        party=ROOT,
        round_num=1,
        client=client,
        reason="the worker was restarted",
        cause=cause,
        attempt=attempt,
    )


def test_a_round_exchanges_keys_and_shares_before_it_trains() -> None:
    simulation = start(job_text(secure()), "a", "b")
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    kinds = ["ClientsSelected", "KeysPosted", "SharesRouted", "RoundClosed", "SegmentCommitted"]
    assert [kind for _, kind, _, _ in simulation.journal if kind in kinds] == kinds * 3
    assert not any(closed.by_policy for closed in simulation.facts(RoundClosed))
    texts = [sentence(simulation.facts(kind)[0]) for kind in (KeysPosted, SharesRouted)]
    assert texts == ["round 1: 4 clients posted keys", "round 1: 4 clients shared secrets"]


def test_clients_train_once_their_shares_are_routed_and_the_sum_names_who_opens_it() -> None:
    simulation = opened(secure(), "a", "b")
    assert not trained(simulation)
    run = simulation.state.runs[RUN]
    status = run.strategy.status(run.job, run.value, world_of(simulation.state))
    assert (status.phase, status.strategy_phase) == (RunPhase.RUNNING, "SHARING")
    exchanged(simulation)
    assert {effect.client for effect in trained(simulation)} == {0, 1, 2, 3}
    assert {effect.routed for effect in trained(simulation)} == {(0, 1, 2, 3)}
    assert {digest("keys1/0"), digest("shares1/0")} <= live_blobs(simulation.state)
    tell(simulation, *(update(client) for client in range(4)))
    fold = due(simulation, AggregateRound)
    assert fold.secure.routed == fold.secure.members == (0, 1, 2, 3)
    assert [worker for _, worker in fold.secure.workers] == ["a", "b", "a", "b"]
    simulation.queue.extend(Report(RUN, fact) for fact in do(fold))
    simulation.run()
    assert not {digest("keys1/0"), digest("shares1/0")} & live_blobs(simulation.state)


def test_who_is_left_out_does_not_train_and_a_later_drop_out_is_in_no_sum() -> None:
    simulation = opened(secure(6, quorum=3), "a", "b")
    tell(simulation, posted(simulation, (left_out(5, Cause.ABSENT),)))
    shares = due(simulation, RouteShares)
    assert shares.may_leave_out
    assert [client for client, _ in shares.clients.workers] == [0, 1, 2, 3, 4]
    tell(simulation, routed(simulation))
    tell(simulation, *(update(client) for client in range(4)))
    assert not simulation.facts(RoundClosed)
    tell(simulation, lost_keys(4))
    (closed,) = simulation.facts(RoundClosed)
    assert [accepted.client for accepted in closed.accepted] == [0, 1, 2, 3]
    assert closed.by_policy
    assert due(simulation, AggregateRound).secure.members == (0, 1, 2, 3, 4)
    assert "client 4: the worker was restarted" in closed.reason


def test_a_client_stays_on_the_worker_that_has_its_secrets() -> None:
    simulation = exchanged(opened(secure(), "a", "b"))
    simulation.tell(LoseWorker(member("b"), "gone"))
    simulation.queue.clear()
    assert {effect.client for effect in trained(simulation)} == {0, 2}


def test_a_round_with_too_few_begins_again_with_new_keys_when_keys_were_lost() -> None:
    simulation = exchanged(opened(secure(3), "a", "b"))
    tell(simulation, update(0))
    tell(simulation, lost_keys(1))
    (again,) = simulation.facts(RoundRestarted)
    assert sentence(again) == (
        "round 1: attempt 1 with new keys: round 1: of 3 clients 2 can be in the sum, and 3 are "
        "needed to unmask it; 1 lost keys: the worker was restarted (client 1)"
    )
    assert due(simulation, PostKeys).clients.attempt == 1
    assert not trained(simulation)
    late = simulation.tell(Report(RUN, update(2)))
    assert isinstance(late, Refusal)
    assert "attempt 0 of round 1 is over" in str(late)
    exchanged(simulation)
    assert {effect.attempt for effect in trained(simulation)} == {1}
    tell(simulation, *(update(client, 1) for client in range(3)))
    assert due(simulation, AggregateRound).secure.attempt == 1


def test_a_refusal_is_not_cured_by_new_keys() -> None:
    simulation = opened(secure(3), "a", "b")
    tell(simulation, posted(simulation, (left_out(2, Cause.REFUSED_BY_SITE),)))
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == (
        "round 1: of 3 clients 2 exchange keys, and fewer than 3 hide nobody; 1 refused: "
        "refused_by_site (client 2)"
    )


def test_keys_that_nobody_posts_fail_the_run() -> None:
    simulation = opened(secure(3), "a")
    gone = tuple(left_out(client, Cause.REFUSED_BY_SITE) for client in range(3))
    tell(simulation, posted(simulation, gone))
    assert "0 exchange keys" in simulation.facts(RunFailed)[0].reason


def test_a_ring_needs_enough_holders_around_each_client() -> None:
    ring = secure(8, secure_aggregation={"degree": 2, "threshold": 0.5})
    simulation = exchanged(opened(ring, "a"))
    tell(simulation, *(lost_keys(client, cause=Cause.EXCEPTION) for client in range(2)))
    (failed,) = simulation.facts(RunFailed)
    assert "too few are left that hold shares of client" in failed.reason


def test_the_attempts_of_a_round_come_to_an_end() -> None:
    simulation = opened(secure(3), "a")
    for attempt in range(5):
        exchanged(simulation)
        tell(simulation, lost_keys(0, attempt))
    assert [each.attempt for each in simulation.facts(RoundRestarted)] == [1, 2, 3, 4]
    assert "lost keys" in simulation.facts(RunFailed)[0].reason


def test_a_sum_that_cannot_be_opened_is_restarted_by_its_effect_alone() -> None:
    simulation = exchanged(opened(secure(3), "a"))
    again = RoundRestarted(party=ROOT, round_num=1, attempt=1, reason="none signs")
    assert isinstance(simulation.tell(Report(RUN, again)), Refusal)
    tell(simulation, *(update(client) for client in range(3)))
    assert due(simulation, AggregateRound) is not None
    tell(simulation, again)
    assert due(simulation, AggregateRound) is None
    assert due(simulation, PostKeys).clients.attempt == 1


def test_facts_of_another_attempt_or_round_are_stale() -> None:
    simulation = opened(secure(3), "a")
    keys, none = posted(simulation), posted(simulation, attempt=1)
    assert isinstance(simulation.tell(Report(RUN, none)), Refusal)
    tell(simulation, keys)
    assert isinstance(simulation.tell(Report(RUN, keys)), Refusal)
    shares = routed(simulation)
    tell(simulation, shares)
    assert isinstance(simulation.tell(Report(RUN, shares)), Refusal)
    tell(simulation, *(update(client) for client in range(3)))
    late = simulation.tell(Report(RUN, shares))
    assert "round 1 is not open" in str(late)


def test_the_deadline_counts_from_when_clients_can_train() -> None:
    timed = secure(4, quorum=0.5, round_deadline_s=10.0)
    simulation = opened(timed, "a")
    assert simulation.facts(ClientsSelected)[0].deadline_s == 10.0
    simulation.now_s = 100.0
    exchanged(simulation)
    assert simulation.agenda.next_deadline == 110.0
    tell(simulation, *(update(client) for client in range(3)))
    simulation.now_s = 110.0
    tell(simulation, update(3))
    assert len(simulation.facts(RoundClosed)[0].accepted) == 4


def test_a_deadline_with_too_few_updates_fails_the_run() -> None:
    simulation = exchanged(opened(secure(4, quorum=0.5, round_deadline_s=10.0), "a"))
    tell(simulation, update(0), update(1))
    simulation.now_s = 20.0
    simulation.tell(LoseWorker(member("b"), "gone"))
    (failed,) = simulation.facts(RunFailed)
    assert failed.reason == (
        "round 1: of 4 clients 2 can be in the sum, and 3 are needed to unmask it"
    )


def test_a_run_that_is_resumed_begins_its_round_again_with_new_keys() -> None:
    simulation = exchanged(opened(secure(3), "a"))
    tell(simulation, *(update(client) for client in range(3)))
    simulation.tell(CancelRun(RUN))
    simulation.run()
    assert not isinstance(simulation.tell(ResumeRun(RUN)), Refusal)
    assert due(simulation, AggregateRound) is None
    assert due(simulation, PostKeys).clients.attempt == 1
