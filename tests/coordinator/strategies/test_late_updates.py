"""Updates that come when their round is closed: refused, or folded into a later round."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import LoseWorker, SubmitRun
from stratagem.coordinator.core.effects import AggregateRound, TrainClient
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.federated.closing import weight
from stratagem.coordinator.strategies.federated.run import Federation
from tests.coordinator.core.jobs import FEDERATED, INNER, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, opened, rejected, start

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
    found = simulation.due(TrainClient)
    return {(e.round_num, e.client): e for e in found}


def selected(simulation: Simulation) -> tuple[int, ...]:
    return simulation.facts(f.ClientsSelected)[-1].clients


def run_of(simulation: Simulation) -> Federation:
    value = simulation.record.value
    assert isinstance(value, Federation)
    return value


def opening(seed: int, spec: dict[str, object]) -> Simulation:
    return opened(spec, *WORKERS, seed=seed)


def answer(simulation: Simulation, effect: TrainClient) -> None:
    simulation.report(do(effect))


def close_round(simulation: Simulation, client: int) -> None:
    """One client answers, which closes the round; it is committed and the next one opens."""
    round_num = run_of(simulation).round_num
    answer(simulation, due(simulation)[round_num, client])
    commit(simulation)


def commit(simulation: Simulation) -> None:
    simulation.report(do(simulation.due_one(AggregateRound)))
    simulation.queue.clear()


def one_late(spec: dict[str, object], rounds_apart: int = 1) -> tuple[Simulation, TrainClient]:
    """Round 1 was closed without a client, which is in none of the next rounds; 2 is open."""
    for seed in range(200):
        simulation = opening(seed, spec)
        first, late = selected(simulation)
        effect = due(simulation)[1, late]
        other = simulation.fork()
        close_round(simulation, first)
        probe = [selected(simulation)]
        for _ in range(rounds_apart):
            close_round(other, selected(other)[0])
            probe.append(selected(other))
        if all(late not in clients for clients in probe):
            return simulation, effect
    raise AssertionError("no seed leaves a client out")


def test_a_left_out_client_trains_on_and_its_update_weighs_less_in_the_open_round() -> None:
    simulation, effect = one_late(strategy())
    assert due(simulation)[1, effect.client] == effect
    assert {key[0] for key in due(simulation)} == {1, 2}
    assert effect.base.digest in live_blobs(simulation.state)
    assert simulation.reason == (
        "round 2: 0 of 2 clients have answered, 1 of earlier rounds train on"
    )
    answer(simulation, effect)
    assert (1, effect.client) not in due(simulation)
    assert (run_of(simulation).round_num, run_of(simulation).accepted) == (2, ()), "no quorum"
    on_time = selected(simulation)[0]
    answer(simulation, due(simulation)[2, on_time])
    closed = simulation.facts(f.RoundClosed)[-1]
    assert [each.client for each in closed.accepted] == sorted([on_time, effect.client])
    by_client = {each.client: each for each in closed.accepted}
    stale, fresh = by_client[effect.client], by_client[on_time]
    assert (stale.staleness, stale.base) == (1, effect.base.digest)
    assert (fresh.staleness, fresh.base) == (0, "")
    spec = simulation.record.job
    assert weight(spec, stale) == (10 + effect.client) * 0.5
    assert weight(spec, fresh) == 10 + on_time
    assert closed.by_policy
    assert closed.reason.endswith(f", 1 suffice, 1 late (client {effect.client} of round 1)")
    assert effect.base.digest in live_blobs(simulation.state)
    commit(simulation)
    assert effect.client not in run_of(simulation).late
    assert simulation.reason.startswith("round 3: 0 of 2 clients have answered")


def test_an_update_that_comes_while_its_own_round_is_folded_waits_for_the_next() -> None:
    for seed in range(50):
        simulation = opening(seed, strategy())
        first, late = selected(simulation)
        effect = due(simulation)[1, late]
        answer(simulation, due(simulation)[1, first])
        assert due(simulation) == {(1, late): effect}
        answer(simulation, effect)
        commit(simulation)
        if late not in selected(simulation):
            break
    close_round(simulation, selected(simulation)[0])
    closed = simulation.facts(f.RoundClosed)[1]
    assert {(each.client, each.staleness) for each in closed.accepted} >= {(late, 1)}


@pytest.mark.parametrize("has_answered", [False, True])
def test_a_client_that_is_selected_again_trains_for_the_new_round_only(has_answered: bool) -> None:
    for seed in range(200):
        simulation = opening(seed, strategy())
        first, late = selected(simulation)
        effect = due(simulation)[1, late]
        answer(simulation, due(simulation)[1, first])
        if has_answered:
            answer(simulation, effect)
        commit(simulation)
        if late in selected(simulation):
            break
    assert [key for key in due(simulation) if key[1] == late] == [(2, late)]
    simulation.refusal(do(effect))
    assert late not in run_of(simulation).late


def test_too_stale_a_client_is_given_up() -> None:
    simulation, effect = one_late(strategy(max_staleness=2), rounds_apart=3)
    close_round(simulation, selected(simulation)[0])
    assert (1, effect.client) in due(simulation)  # two rounds late in round 3
    close_round(simulation, selected(simulation)[0])
    assert (1, effect.client) not in due(simulation)
    assert simulation.refusal(do(effect)).reason == "round 1 is closed"
    assert effect.base.digest not in {e.base.digest for e in due(simulation).values()}


def test_late_updates_are_refused_unless_asked_for_and_by_silos() -> None:
    simulation, effect = one_late(strategy(late_updates="refuse"))
    assert {key[0] for key in due(simulation)} == {2}
    assert simulation.refusal(do(effect)).reason == "round 1 is closed"
    spec = strategy(inner=INNER)
    with pytest.raises(InvalidInputError, match=r"late_updates: a silo ends with its round"):
        Simulation().tell(SubmitRun(RUN, job_text(spec), 0.0))


def test_a_second_answer_is_refused_and_a_rejected_one_is_forgotten() -> None:
    simulation, effect = one_late(strategy())
    rejects = simulation.fork()
    answer(simulation, effect)
    again = simulation.refusal(do(effect)).reason
    assert again == f"client {effect.client} has answered round 1 already"
    rejects.report(rejected(effect.client, "not finite"))
    assert (1, effect.client) not in due(rejects)
    close_round(rejects, selected(rejects)[0])
    assert all(not each.staleness for each in rejects.facts(f.RoundClosed)[1].accepted)


def test_a_late_client_whose_worker_is_lost_is_given_up() -> None:
    simulation, effect = one_late(strategy())
    simulation.tell(LoseWorker(effect.member, "killed"))
    assert (1, effect.client) not in due(simulation)
    given_up = simulation.facts(f.ClientsAssigned)[-1]
    assert (given_up.round_num, given_up.assignments[0].member) == (1, None)
    simulation.come([effect.member.worker_id], 1)
    simulation.run()
    close_round(simulation, selected(simulation)[0])


def test_a_deadline_leaves_clients_to_the_next_round_too() -> None:
    quarter = {"client_selection": {"method": "Random", "fraction": 0.25}}
    simulation = opening(0, strategy(over_select=0, quorum=0.5, round_deadline_s=60.0) | quarter)
    first, late = selected(simulation)
    answer(simulation, due(simulation)[1, first])
    simulation.tick(61.0)
    commit(simulation)
    assert ((1, late) in due(simulation)) == (late not in selected(simulation))


def test_the_last_round_ends_the_run_without_its_late_clients() -> None:
    simulation, _ = one_late(strategy(rounds=2))
    close_round(simulation, selected(simulation)[0])
    assert simulation.phase is RunPhase.COMPLETED
    assert not due(simulation)
    assert not run_of(simulation).late


def test_a_run_of_many_rounds_ends() -> None:
    simulation = start(job_text(strategy(rounds=12)), *WORKERS)
    simulation.complete()
    simulation.crash()
    received = {(each.round_num, each.client) for each in simulation.facts(f.UpdateReceived)}
    taken = [
        (closed.round_num - each.staleness, each.client)
        for closed in simulation.facts(f.RoundClosed)
        for each in closed.accepted
    ]
    assert set(taken) <= received
    assert len(taken) == len(set(taken))
