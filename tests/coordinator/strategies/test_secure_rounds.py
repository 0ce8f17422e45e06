"""Secure rounds in the pure core: what is exchanged before training, who is left out, new keys."""

from typing import Any

import pytest

from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, Refusal, Report, ResumeRun
from stratagem.coordinator.core.effects import AggregateRound, PostKeys, RouteShares
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    do,
    opened,
    rejected,
    start,
    trained,
)

pytestmark = pytest.mark.core


def secure(num_clients: int = 4, section: Any = None, **options: Any) -> dict[str, Any]:
    options = {"secure_aggregation": section or {}, **options}
    return {**FEDERATED, "num_clients": num_clients, "options": options}


def due(simulation: Simulation, kind: type[Any]) -> Any:
    found = simulation.due(kind)
    return found[0] if found else None


def without(simulation: Simulation, kind: type[Any], *left_out: f.LeftOut, **fields: Any) -> f.Fact:
    """What an exchange ends with, but for clients that are left out."""
    fact = do(due(simulation, kind))
    assert isinstance(fact, f.KeysPosted | f.SharesRouted)
    gone = {each.client for each in left_out}
    clients = tuple(client for client in fact.clients if client not in gone)
    return fact.model_copy(update={"clients": clients, "left_out": left_out, **fields})


def tell(simulation: Simulation, *facts: f.Fact) -> None:
    simulation.report(*facts)
    simulation.queue.clear()


def exchanged(simulation: Simulation) -> Simulation:
    """With keys and shares of all, and nobody trained."""
    tell(simulation, without(simulation, PostKeys))
    tell(simulation, without(simulation, RouteShares))
    return simulation


def update(client: int, attempt: int = 0) -> f.UpdateReceived:
    of: dict[str, Any] = {"digest": digest(f"update{client}"), "num_samples": 1, "attempt": attempt}
    of |= {"loss": float("nan"), "seconds": 0.0, "num_steps": 1}
    return f.UpdateReceived(party=f.ROOT, round_num=1, client=client, **of)


def updates(simulation: Simulation, *clients: int, attempt: int = 0) -> None:
    tell(simulation, *(update(client, attempt) for client in clients))


def left_out(client: int, cause: Cause) -> f.LeftOut:
    return f.LeftOut(client=client, reason=cause.value, cause=cause)


def lost_keys(client: int, attempt: int = 0, cause: Cause = Cause.KEYS_LOST) -> f.UpdateRejected:
    return rejected(client, "the worker was restarted", cause, attempt=attempt)


def failure(simulation: Simulation) -> str:
    return simulation.fact(f.RunFailed).reason


def test_a_round_exchanges_keys_and_shares_before_it_trains() -> None:
    simulation = start(job_text(secure()), "a", "b")
    simulation.complete()
    kinds = ["ClientsSelected", "KeysPosted", "SharesRouted", "RoundClosed", "SegmentCommitted"]
    assert simulation.kinds(*kinds) == kinds * 3
    assert not any(closed.by_policy for closed in simulation.facts(f.RoundClosed))
    texts = [sentence(simulation.facts(kind)[0]) for kind in (f.KeysPosted, f.SharesRouted)]
    assert texts == ["round 1: 4 clients posted keys", "round 1: 4 clients shared secrets"]


def test_clients_train_once_their_shares_are_routed_and_the_sum_names_who_opens_it() -> None:
    simulation = opened(secure(), "a", "b")
    assert not trained(simulation)
    status = simulation.status
    assert (status.phase, status.strategy_phase) == (RunPhase.RUNNING, "SHARING")
    exchanged(simulation)
    away = simulation.fork()
    away.lose("b")
    assert {effect.client for effect in trained(away)} == {0, 2}, "b has their secrets"
    assert {effect.client for effect in trained(simulation)} == {0, 1, 2, 3}
    assert {effect.routed for effect in trained(simulation)} == {(0, 1, 2, 3)}
    assert {digest("keys1/0"), digest("shares1/0")} <= live_blobs(simulation.state)
    updates(simulation, *range(4))
    fold = due(simulation, AggregateRound)
    assert fold.secure.routed == fold.secure.members == (0, 1, 2, 3)
    assert [worker for _, worker in fold.secure.workers] == ["a", "b", "a", "b"]
    simulation.queue.append(Report(RUN, do(fold)))
    simulation.run()
    assert not {digest("keys1/0"), digest("shares1/0")} & live_blobs(simulation.state)


def test_who_is_left_out_does_not_train_and_a_later_drop_out_is_in_no_sum() -> None:
    simulation = opened(secure(6, quorum=3), "a", "b")
    tell(simulation, without(simulation, PostKeys, left_out(5, Cause.ABSENT)))
    shares = due(simulation, RouteShares)
    assert shares.may_leave_out
    assert [client for client, _ in shares.clients.workers] == [0, 1, 2, 3, 4]
    tell(simulation, without(simulation, RouteShares))
    updates(simulation, *range(4))
    assert not simulation.facts(f.RoundClosed)
    tell(simulation, lost_keys(4))
    closed = simulation.fact(f.RoundClosed)
    assert [accepted.client for accepted in closed.accepted] == [0, 1, 2, 3]
    assert closed.by_policy
    assert due(simulation, AggregateRound).secure.members == (0, 1, 2, 3, 4)
    assert "client 4: the worker was restarted" in closed.reason


def test_a_round_with_too_few_begins_again_with_new_keys_when_keys_were_lost() -> None:
    simulation = exchanged(opened(secure(3), "a", "b"))
    tell(simulation, update(0), lost_keys(1))
    assert sentence(simulation.fact(f.RoundRestarted)) == (
        "round 1: attempt 1 with new keys: round 1: of 3 clients 2 can be in the sum, and 3 are "
        "needed to unmask it; 1 lost keys: the worker was restarted (client 1)"
    )
    assert due(simulation, PostKeys).clients.attempt == 1
    assert not trained(simulation)
    assert "attempt 0 of round 1 is over" in str(simulation.refusal(update(2)))
    exchanged(simulation)
    assert {effect.attempt for effect in trained(simulation)} == {1}
    updates(simulation, *range(3), attempt=1)
    assert due(simulation, AggregateRound).secure.attempt == 1


def test_a_refusal_is_not_cured_by_new_keys_nor_keys_that_nobody_posts() -> None:
    simulation = opened(secure(3), "a", "b")
    nobody = simulation.fork()
    tell(simulation, without(simulation, PostKeys, left_out(2, Cause.REFUSED_BY_SITE)))
    assert failure(simulation) == (
        "round 1: of 3 clients 2 exchange keys, and fewer than 3 hide nobody; 1 refused: "
        "refused_by_site (client 2)"
    )
    gone = (left_out(client, Cause.REFUSED_BY_SITE) for client in range(3))
    tell(nobody, without(nobody, PostKeys, *gone))
    assert "0 exchange keys" in failure(nobody)


def test_attempts_come_to_an_end_and_a_ring_needs_enough_holders_around_each_client() -> None:
    simulation = opened(secure(3), "a")
    for attempt in range(5):
        exchanged(simulation)
        tell(simulation, lost_keys(0, attempt))
    assert [each.attempt for each in simulation.facts(f.RoundRestarted)] == [1, 2, 3, 4]
    assert "lost keys" in failure(simulation)
    ring = secure(8, {"degree": 2, "threshold": 0.5})
    simulation = exchanged(opened(ring, "a"))
    tell(simulation, *(lost_keys(client, cause=Cause.EXCEPTION) for client in range(2)))
    assert "too few are left that hold shares of client" in failure(simulation)


def test_a_sum_that_cannot_be_opened_is_restarted_by_its_effect_alone() -> None:
    simulation = exchanged(opened(secure(3), "a"))
    again = f.RoundRestarted(party=f.ROOT, round_num=1, attempt=1, reason="none signs")
    simulation.refusal(again)
    updates(simulation, *range(3))
    stopped = simulation.fork()
    assert due(simulation, AggregateRound) is not None
    tell(simulation, again)
    assert due(simulation, AggregateRound) is None
    assert due(simulation, PostKeys).clients.attempt == 1
    stopped.tell(CancelRun(RUN))
    stopped.run()
    assert not isinstance(stopped.tell(ResumeRun(RUN)), Refusal)
    assert due(stopped, AggregateRound) is None, "a resumed run begins again with new keys, too"
    assert due(stopped, PostKeys).clients.attempt == 1


def test_facts_of_another_attempt_or_round_are_stale() -> None:
    simulation = opened(secure(3), "a")
    keys = without(simulation, PostKeys)
    simulation.refusal(without(simulation, PostKeys, attempt=1))
    tell(simulation, keys)
    simulation.refusal(keys)
    shares = without(simulation, RouteShares)
    tell(simulation, shares)
    simulation.refusal(shares)
    updates(simulation, *range(3))
    assert "round 1 is not open" in str(simulation.refusal(shares))


def test_the_deadline_counts_from_when_clients_can_train() -> None:
    simulation = opened(secure(4, quorum=0.5, round_deadline_s=10.0), "a")
    assert simulation.fact(f.ClientsSelected).deadline_s == 10.0
    simulation.now_s = 100.0
    exchanged(simulation)
    assert simulation.agenda.next_deadline == 110.0
    updates(simulation, 0, 1)
    fails = simulation.fork()
    updates(simulation, 2)
    simulation.now_s = 110.0
    updates(simulation, 3)
    assert len(simulation.fact(f.RoundClosed).accepted) == 4
    fails.now_s = 120.0
    fails.lose("b")
    assert failure(fails) == (
        "round 1: of 4 clients 2 can be in the sum, and 3 are needed to unmask it"
    )
