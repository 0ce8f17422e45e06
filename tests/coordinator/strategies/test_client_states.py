"""What clients keep to themselves: with what they begin a round, evaluate, and begin anew."""

from typing import Any

import pytest

from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, ResumeRun
from stratagem.coordinator.core.effects import AggregateRound, EvaluateState, KeptState
from stratagem.coordinator.core.pending import live_blobs, pending
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies.federated.ledgers import ClientStates
from stratagem.coordinator.strategies.federated.run import Federation
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, digest, do, rejected, start, trained

pytestmark = pytest.mark.core


NAMES = tuple("abcd")
PERSONAL, SCAFFOLD = {"personal": ["head.*"]}, {"control": "scaffold"}
LOST = f.ClientStateLost(party=f.ROOT, round_num=2, client=1, reason="no such file")
SGD = {"optimizer": {"name": "sgd", "lr": 0.1}}
WARD = {"data": {"worker_local": "ward"}}
NONE = dict.fromkeys(range(4))


def begun(own: dict[str, Any] = PERSONAL, rounds: int = 3) -> Simulation:
    """Four sites, at the beginning of a run that evaluates each round."""
    strategy = {**FEDERATED, "rounds": rounds, "options": own}
    evaluation = {"split": "test", "metrics": []}
    simulation = start(job_text(strategy, retention=8, **SGD, **WARD, evaluation=evaluation))
    simulation.sites(NAMES)
    return simulation


def state_of(round_num: int, client: int) -> KeptState:
    return KeptState(round_num, digest(f"state{round_num}/{client}"))


def states(round_num: int) -> dict[int, KeptState | None]:
    """What all have kept of one round."""
    return {client: state_of(round_num, client) for client in range(4)}


def run_of(simulation: Simulation) -> Federation:
    value = simulation.record.value
    assert isinstance(value, Federation)
    return value


def kept(simulation: Simulation) -> ClientStates:
    found = run_of(simulation).client_states
    assert found is not None
    return found


def known(simulation: Simulation) -> dict[int, KeptState | None]:
    """With what the clients that are to train begin."""
    return {effect.client: effect.state for effect in trained(simulation)}


def until_round(simulation: Simulation, round_num: int) -> None:
    """Go on until a round is open in which nobody has answered, and all else is done."""
    held = []
    while simulation.queue:
        command = simulation.queue.popleft()
        if isinstance(command.fact, f.UpdateReceived) and command.fact.round_num == round_num:
            held.append(command)
        else:
            simulation.tell(command)
    simulation.queue.extend(held)


def until_committed(simulation: Simulation, num_commits: int) -> None:
    """So many commits, while nobody evaluates."""
    while len(simulation.record.commits) < num_commits:
        command = simulation.queue.popleft()
        if not isinstance(command.fact, f.ClientEvaluated):
            simulation.tell(command)


def go_back(simulation: Simulation) -> None:
    """To the first commit."""
    simulation.queue.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=1))


def test_a_client_begins_each_round_with_what_it_kept_of_the_one_before() -> None:
    simulation = begun()
    until_round(simulation, 1)
    assert known(simulation) == NONE
    until_round(simulation, 2)
    assert known(simulation) == states(1)
    training = trained(simulation)
    simulation.crash()  # the same, from the journal
    assert trained(simulation) == training
    simulation.complete()
    assert simulation.record.is_reproducible
    nothing = begun({})
    until_round(nothing, 2)
    assert known(nothing) == NONE
    assert run_of(nothing).client_states is None


def test_a_commit_is_evaluated_with_what_its_clients_had_then() -> None:
    simulation = begun()
    until_committed(simulation, 4)
    assert run_of(simulation).kept_rounds(2) == (1, 2, 3)
    for number in (1, 2, 3):  # a worker refuses a state that is older than one that it has had
        evaluating = simulation.due(EvaluateState)
        assert {(e.base.segment, e.client, e.client_state) for e in evaluating} == {
            (number, client, state_of(number, client)) for client in range(4)
        }
        simulation.report(*map(do, evaluating))
        assert simulation.facts(f.Evaluated)[-1].segment == number
    assert run_of(simulation).kept_rounds(2) == (3,)


def test_a_client_without_an_update_begins_again_from_what_it_had() -> None:
    simulation = begun()
    until_round(simulation, 2)
    simulation.queue.clear()
    simulation.report(rejected(1, "not finite", round_num=2))
    simulation.report(*map(do, trained(simulation)))
    until_round(simulation, 3)
    assert known(simulation) == {**states(2), 1: state_of(1, 1)}


def test_a_lost_state_makes_the_run_replayable_only() -> None:
    """And personal layers do not begin anew with those of another client."""
    simulation = begun()
    until_round(simulation, 2)
    training = trained(simulation)
    simulation.report(LOST)
    assert trained(simulation) == training  # it goes on with what it has begun
    assert not simulation.record.is_reproducible
    simulation.refusal(LOST.model_copy(update={"round_num": 1}))
    until_round(simulation, 3)
    assert known(simulation) == states(2)
    simulation.complete()
    assert simulation.fact(f.ClientStateLost)


def test_late_updates_bring_their_states_with_them() -> None:
    drawn = {**FEDERATED, "client_selection": {"method": "Random", "fraction": 0.25}}
    options = {**PERSONAL, "over_select": 1, "late_updates": {"discount": 0.5}}
    simulation = start(job_text({**drawn, "options": options}, **WARD))
    simulation.sites(NAMES)
    until_round(simulation, 1)
    simulation.queue.clear()
    in_time, late = trained(simulation)
    simulation.report(do(in_time))
    assert late in trained(simulation)
    simulation.report(do(late))
    expected = {each.client: state_of(1, each.client) for each in (in_time, late)}
    assert kept(simulation).newest == expected


def test_a_run_that_goes_back_begins_its_clients_anew_and_evaluates_what_is_owed() -> None:
    simulation = begun()
    until_committed(simulation, 3)
    go_back(simulation)
    assert kept(simulation) == ClientStates(is_incomplete=True)
    assert [owed.states for owed in run_of(simulation).evaluations.values()] == [states(1)]
    assert not simulation.record.is_reproducible
    owed = {e.client: (e.base.segment, e.client_state) for e in simulation.due(EvaluateState)}
    assert owed == {client: (1, state_of(1, client)) for client in range(4)}
    until_round(simulation, 2)
    assert known(simulation) == NONE


def folds(simulation: Simulation) -> dict[int, bool]:
    """Whether the common variate begins anew, by round, to the end of the run."""
    found = {}
    while simulation.queue:
        for effect in pending(simulation.state):
            if isinstance(effect, AggregateRound):
                found[effect.round_num] = effect.is_control_anew
        simulation.step()
    assert simulation.phase is RunPhase.COMPLETED
    return found


def test_a_correction_is_kept_from_round_to_round_and_no_evaluation_needs_it() -> None:
    simulation = begun(SCAFFOLD)
    until_round(simulation, 2)
    assert known(simulation) == states(1)
    assert not any(owed.states for owed in run_of(simulation).evaluations.values())
    assert folds(simulation) == {2: False, 3: False}
    assert simulation.record.is_reproducible


def test_after_a_loss_or_a_way_back_all_corrections_begin_anew_together() -> None:
    """The round of the loss ends without corrections."""
    simulation = begun(SCAFFOLD, rounds=4)
    until_round(simulation, 2)
    simulation.report(LOST)
    ends = simulation.fork()
    assert folds(ends) == {2: True, 3: False, 4: False}
    simulation.crash()
    assert known(simulation) == states(1)
    until_round(simulation, 3)
    assert known(simulation) == NONE
    simulation = begun(SCAFFOLD, rounds=4)
    until_round(simulation, 3)
    go_back(simulation)
    assert folds(simulation) == {2: True, 3: False, 4: False}


def test_the_newest_states_of_simulated_clients_stay_in_the_store() -> None:
    """Those of sites lie there, and nobody here has them."""
    drawn = {"client_selection": {"method": "Random", "fraction": 0.5}, "rounds": 6}
    simulation = start(job_text({**FEDERATED, **drawn, "options": SCAFFOLD}, **SGD), "a")
    until_round(simulation, 6)
    newest = kept(simulation).newest.items()
    stored = {state_of(state.round_num, client).digest for client, state in newest}
    assert len(stored) > 2
    assert stored <= live_blobs(simulation.state)
    until_round(at_sites := begun(SCAFFOLD), 2)
    assert not live_blobs(at_sites.state) & {state_of(1, client).digest for client in range(4)}


@pytest.mark.parametrize("own", [PERSONAL, SCAFFOLD])
def test_a_site_that_can_keep_nothing_is_no_client_and_is_named(own: dict[str, Any]) -> None:
    """But where clients need not."""
    simulation = start(job_text({**FEDERATED, "options": own}, **WARD, **SGD))
    for name in NAMES:
        simulation.sites(name, keeps_nothing=name in "bd")
    assert simulation.reason == (
        "4 workers with data 'ward' are needed, 2 are here; b, d have no --data-dir, where clients "
        "of this job keep their states"
    )
    simulation.sites("de")
    simulation.run()
    assert {each.worker_id for each in run_of(simulation).roster} == {"a", "c", "d", "e"}
    plain = start(job_text(FEDERATED, **WARD))
    plain.sites(NAMES, keeps_nothing=True)
    until_round(plain, 1)
    assert len(run_of(plain).roster) == 4
