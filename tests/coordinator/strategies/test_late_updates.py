"""Updates that come when their round is closed: refused, or folded into a later round."""

from collections.abc import Callable
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.coordinator.core.commands import LoseWorker, Refusal, Report, SubmitRun, Tick
from stratagem.coordinator.core.effects import AggregateRound, TrainClient
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientsAssigned,
    ClientsSelected,
    RoundClosed,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun
from stratagem.coordinator.strategies.federated.late_updates import weight
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, phase, reason, register, start

pytestmark = pytest.mark.core

WORKERS = tuple("abcdefgh")


def strategy(*, rounds: int = 6, **options: object) -> dict[str, Any]:
    """Two of eight clients are drawn in each round, and the first answer closes it."""
    return {
        **FEDERATED,
        "num_clients": 8,
        "rounds": rounds,
        "client_selection": {"method": "Random", "fraction": 0.125},
        "options": {"over_select": 1, "late_updates": {"discount": 0.5}, **options},
    }


def due(simulation: Simulation) -> dict[tuple[int, int], TrainClient]:
    """By (round, client)."""
    found = [e for e in pending(simulation.state) if isinstance(e, TrainClient)]
    return {(e.round_num, e.client): e for e in found}


def selected(simulation: Simulation) -> tuple[int, ...]:
    return simulation.facts(ClientsSelected)[-1].clients


def run_of(simulation: Simulation) -> FederatedRun:
    value = simulation.state.runs[RUN].value
    assert isinstance(value, FederatedRun)
    return value


def opened(seed: int, spec: dict[str, object]) -> Simulation:
    simulation = start(job_text(spec, seed=seed), *WORKERS)
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    return simulation


def answer(simulation: Simulation, effect: TrainClient) -> object:
    return simulation.tell(Report(RUN, do(effect)[0]))


def close_round(simulation: Simulation, client: int) -> None:
    """One client answers, which closes the round; it is committed and the next one opens."""
    round_num = run_of(simulation).round_num
    answer(simulation, due(simulation)[round_num, client])
    commit(simulation)


def commit(simulation: Simulation) -> None:
    (fold,) = [e for e in pending(simulation.state) if isinstance(e, AggregateRound)]
    simulation.tell(Report(RUN, do(fold)[0]))
    simulation.queue.clear()


def one_late(spec: dict[str, object], rounds_apart: int = 1) -> tuple[Simulation, TrainClient]:
    """Round 1 was closed without a client, which is in none of the next rounds; 2 is open."""
    for seed in range(200):
        simulation = opened(seed, spec)
        first, late = selected(simulation)
        effect = due(simulation)[1, late]
        close_round(simulation, first)
        probe = [selected(simulation)]
        other = opened(seed, spec)
        for _ in range(rounds_apart):
            close_round(other, selected(other)[0])
            probe.append(selected(other))
        if all(late not in clients for clients in probe):
            return simulation, effect
    raise AssertionError("no seed leaves a client out")


def test_a_left_out_client_trains_on_as_if_nothing_had_happened() -> None:
    simulation, effect = one_late(strategy())
    assert due(simulation)[1, effect.client] == effect
    assert {key[0] for key in due(simulation)} == {1, 2}
    assert effect.base.digest in live_blobs(simulation.state)


def test_its_update_enters_the_round_that_is_open_and_weighs_less() -> None:
    simulation, effect = one_late(strategy())
    answer(simulation, effect)
    assert (1, effect.client) not in due(simulation)
    on_time = selected(simulation)[0]
    answer(simulation, due(simulation)[2, on_time])
    closed = simulation.facts(RoundClosed)[-1]
    assert [each.client for each in closed.accepted] == sorted([on_time, effect.client])
    by_client = {each.client: each for each in closed.accepted}
    stale = by_client[effect.client]
    assert (stale.staleness, stale.base) == (1, effect.base.digest)
    assert (by_client[on_time].staleness, by_client[on_time].base) == (0, "")
    spec = simulation.state.runs[RUN].job
    assert weight(spec, stale) == (10 + effect.client) * 0.5
    assert weight(spec, by_client[on_time]) == 10 + on_time
    assert closed.by_policy
    assert closed.reason.endswith(f", 1 suffice, 1 late (client {effect.client} of round 1)")
    assert effect.base.digest in live_blobs(simulation.state)
    commit(simulation)
    assert effect.client not in run_of(simulation).late


def test_it_does_not_count_for_the_quorum() -> None:
    simulation, effect = one_late(strategy())
    answer(simulation, effect)
    assert run_of(simulation).round_num == 2
    assert not run_of(simulation).accepted


def test_an_update_that_comes_while_its_own_round_is_folded_waits_for_the_next() -> None:
    for seed in range(50):
        simulation = opened(seed, strategy())
        first, late = selected(simulation)
        effect = due(simulation)[1, late]
        answer(simulation, due(simulation)[1, first])
        assert due(simulation) == {(1, late): effect}
        answer(simulation, effect)
        commit(simulation)
        if late not in selected(simulation):
            break
    close_round(simulation, selected(simulation)[0])
    closed = simulation.facts(RoundClosed)[1]
    assert {(each.client, each.staleness) for each in closed.accepted} >= {(late, 1)}


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_client_that_is_selected_again_trains_for_the_new_round_only(has_answered: bool) -> None:
    for seed in range(200):
        simulation = opened(seed, strategy())
        first, late = selected(simulation)
        effect = due(simulation)[1, late]
        answer(simulation, due(simulation)[1, first])
        if has_answered:
            answer(simulation, effect)
        commit(simulation)
        if late in selected(simulation):
            break
    assert [key for key in due(simulation) if key[1] == late] == [(2, late)]
    assert isinstance(answer(simulation, effect), Refusal)
    assert late not in run_of(simulation).late


def test_too_stale_a_client_is_given_up() -> None:
    simulation, effect = one_late(strategy(max_staleness=2), rounds_apart=3)
    close_round(simulation, selected(simulation)[0])
    assert (1, effect.client) in due(simulation)  # two rounds late in round 3
    close_round(simulation, selected(simulation)[0])
    assert (1, effect.client) not in due(simulation)
    refusal = answer(simulation, effect)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "round 1 is closed"
    assert effect.base.digest not in {e.base.digest for e in due(simulation).values()}


def test_late_updates_are_refused_unless_asked_for() -> None:
    simulation, effect = one_late(strategy(late_updates="refuse"))
    assert {key[0] for key in due(simulation)} == {2}
    refusal = answer(simulation, effect)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "round 1 is closed"


def test_a_second_answer_is_refused_and_a_rejected_one_is_forgotten() -> None:
    simulation, effect = one_late(strategy())
    answer(simulation, effect)
    refusal = answer(simulation, effect)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == f"client {effect.client} has answered round 1 already"
    simulation, effect = one_late(strategy())
    rejected = UpdateRejected(party=ROOT, round_num=1, client=effect.client, reason="not finite")
    simulation.tell(Report(RUN, rejected))
    assert (1, effect.client) not in due(simulation)
    close_round(simulation, selected(simulation)[0])
    assert all(not each.staleness for each in simulation.facts(RoundClosed)[1].accepted)


def test_a_late_client_whose_worker_is_lost_is_given_up() -> None:
    simulation, effect = one_late(strategy())
    simulation.tell(LoseWorker(effect.member, "killed"))
    assert (1, effect.client) not in due(simulation)
    given_up = simulation.facts(ClientsAssigned)[-1]
    assert (given_up.round_num, given_up.assignments[0].member) == (1, None)
    simulation.tell(register(effect.member.worker_id, start=1))
    simulation.run()
    close_round(simulation, selected(simulation)[0])


def test_a_deadline_leaves_clients_to_the_next_round_too() -> None:
    spec = {
        **strategy(over_select=0, quorum=0.5, round_deadline_s=60.0),
        "client_selection": {"method": "Random", "fraction": 0.25},
    }
    simulation = opened(0, spec)
    first, late = selected(simulation)
    answer(simulation, due(simulation)[1, first])
    simulation.now_s = 61.0
    simulation.tell(Tick())
    commit(simulation)
    assert ((1, late) in due(simulation)) == (late not in selected(simulation))


def test_every_replay_of_the_journal_comes_to_the_same_state() -> None:
    simulation, effect = one_late(strategy())
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: answer(simulation, effect),
        lambda: answer(simulation, due(simulation)[2, selected(simulation)[0]]),
        lambda: commit(simulation),
    ]
    for step in steps:
        step()
        before, wanted = simulation.state, pending(simulation.state)
        simulation.crash()
        simulation.queue.clear()
        assert run_of(simulation) == before.runs[RUN].value
        assert pending(simulation.state) == wanted
        assert live_blobs(simulation.state) == live_blobs(before)


def test_the_last_round_ends_the_run_without_its_late_clients() -> None:
    simulation, _ = one_late(strategy(rounds=2))
    close_round(simulation, selected(simulation)[0])
    assert phase(simulation) is RunPhase.COMPLETED
    assert not due(simulation)
    assert not run_of(simulation).late


def test_a_run_of_many_rounds_ends() -> None:
    simulation = start(job_text(strategy(rounds=12)), *WORKERS)
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    received = {(each.round_num, each.client) for each in simulation.facts(UpdateReceived)}
    taken = [
        (closed.round_num - each.staleness, each.client)
        for closed in simulation.facts(RoundClosed)
        for each in closed.accepted
    ]
    assert set(taken) <= received
    assert len(taken) == len(set(taken))


def test_silos_refuse_them() -> None:
    spec = strategy()
    spec["options"] = {**spec["options"], "inner": {"type": "DataParallel", "num_replicas": 2,
        "aggregation": {"method": "AllReduce"}}}  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"late_updates: a silo ends with its round"):
        Simulation().tell(SubmitRun(RUN, job_text(spec), 0.0))


def test_people_are_told_who_trains_on_for_an_earlier_round() -> None:
    simulation, effect = one_late(strategy())
    assert reason(simulation) == (
        "round 2: 0 of 2 clients have answered, 1 of earlier rounds train on"
    )
    answer(simulation, effect)
    answer(simulation, due(simulation)[2, selected(simulation)[0]])
    commit(simulation)
    assert reason(simulation).startswith("round 3: 0 of 2 clients have answered")
