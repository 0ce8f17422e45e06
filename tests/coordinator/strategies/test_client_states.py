"""What clients keep to themselves: with what they begin a round, evaluate, and begin anew."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import CancelRun, Refusal, Report, ResumeRun
from stratagem.coordinator.core.effects import (
    AggregateRound,
    EvaluateState,
    KeptState,
    TrainClient,
)
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientEvaluated,
    ClientStateLost,
    Evaluated,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import live_blobs, pending
from stratagem.coordinator.strategies.client_states.client_states import ClientStates
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import (
    RUN,
    Simulation,
    digest,
    do,
    phase,
    reason,
    register,
    start,
)

pytestmark = pytest.mark.core

NAMES = tuple("abcd")


PERSONAL = {"personal": ["head.*"]}
SCAFFOLD = {"control": "scaffold"}


def begun(own: dict[str, Any] = PERSONAL, rounds: int = 3, **options: Any) -> Simulation:
    """Four sites, at the beginning of a run that evaluates each round."""
    strategy = {**FEDERATED, "rounds": rounds, "options": {**own, **options}}
    sections: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1}}
    sections |= {"data": {"worker_local": "ward"}, "evaluation": {"split": "test", "metrics": []}}
    simulation = start(job_text(strategy, retention=8, **sections))
    for name in NAMES:
        simulation.tell(register(name, local_data=("ward",)))
    return simulation


def state_of(round_num: int, client: int) -> KeptState:
    return KeptState(round_num, digest(f"state{round_num}/{client}"))


def run_of(simulation: Simulation) -> FederatedRun:
    value = simulation.state.runs[RUN].value
    assert isinstance(value, FederatedRun)
    return value


def due(simulation: Simulation, kind: type[Any]) -> dict[int, Any]:
    """Effects of a kind, by client."""
    found = [e for e in pending(simulation.state) if isinstance(e, kind)]
    return {e.client: e for e in sorted(found, key=repr)}


def until_round(simulation: Simulation, round_num: int) -> None:
    """Go on until a round is open in which nobody has answered, and all else is done."""
    held = []
    while simulation.queue:
        command = simulation.queue.popleft()
        if isinstance(command.fact, UpdateReceived) and command.fact.round_num == round_num:
            held.append(command)
        else:
            simulation.tell(command)
    simulation.queue.extend(held)


def test_a_client_begins_each_round_with_what_it_kept_of_the_one_before() -> None:
    simulation = begun()
    until_round(simulation, 1)
    assert {e.state for e in due(simulation, TrainClient).values()} == {None}
    until_round(simulation, 2)
    training = due(simulation, TrainClient)
    assert {c: e.state for c, e in training.items()} == {c: state_of(1, c) for c in range(4)}
    simulation.crash()  # the same, from the journal
    assert due(simulation, TrainClient) == training
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert simulation.state.runs[RUN].is_reproducible


def test_where_clients_keep_nothing_no_effect_speaks_of_it() -> None:
    simulation = begun({})
    until_round(simulation, 2)
    assert {e.state for e in due(simulation, TrainClient).values()} == {None}
    assert run_of(simulation).client_states is None


def test_a_commit_is_evaluated_with_what_its_clients_had_then() -> None:
    simulation = begun()
    while len(simulation.state.runs[RUN].commits) < 4:  # nobody evaluates meanwhile
        command = simulation.queue.popleft()
        if not isinstance(command.fact, ClientEvaluated):
            simulation.tell(command)
    evaluating = [e for e in pending(simulation.state) if isinstance(e, EvaluateState)]
    assert len(evaluating) == 3 * 4
    assert {(e.base.segment, e.client, e.client_state) for e in evaluating} == {
        (n, c, state_of(n, c)) for n in (1, 2, 3) for c in range(4)
    }
    states = run_of(simulation).client_states
    assert states is not None
    assert states.kept_rounds(2) == (1, 2, 3)
    for effect in sorted(evaluating, key=repr):
        if effect.base.segment == 2:
            simulation.tell(Report(RUN, do(effect)[0]))
    assert simulation.facts(Evaluated)[-1].segment == 2
    states = run_of(simulation).client_states
    assert states is not None
    assert states.kept_rounds(2) == (1, 3)


def test_a_client_without_an_update_begins_again_from_what_it_had() -> None:
    simulation = begun()
    until_round(simulation, 2)
    simulation.queue.clear()
    training = due(simulation, TrainClient)
    rejected = UpdateRejected(party=ROOT, round_num=2, client=1, reason="not finite")
    simulation.tell(Report(RUN, rejected))
    for client in (0, 2, 3):
        simulation.tell(Report(RUN, do(training[client])[0]))
    until_round(simulation, 3)
    known = {c: e.state for c, e in due(simulation, TrainClient).items()}
    assert known == {0: state_of(2, 0), 1: state_of(1, 1), 2: state_of(2, 2), 3: state_of(2, 3)}


def test_a_lost_state_makes_the_run_replayable_only() -> None:
    simulation = begun()
    until_round(simulation, 2)
    training = due(simulation, TrainClient)
    lost = ClientStateLost(party=ROOT, round_num=2, client=1, reason="no such file")
    simulation.tell(Report(RUN, lost))
    assert due(simulation, TrainClient) == training  # it goes on with what it has begun
    assert not simulation.state.runs[RUN].is_reproducible
    early = lost.model_copy(update={"round_num": 1})
    refused = simulation.tell(Report(RUN, early))
    assert isinstance(refused, Refusal)
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    assert len(simulation.facts(ClientStateLost)) == 1


def test_late_updates_bring_their_states_with_them() -> None:
    drawn = {**FEDERATED, "client_selection": {"method": "Random", "fraction": 0.25}}
    options = {"personal": ["head.*"], "over_select": 1, "late_updates": {"discount": 0.5}}
    simulation = start(job_text({**drawn, "options": options}, data={"worker_local": "ward"}))
    for name in NAMES:
        simulation.tell(register(name, local_data=("ward",)))
    until_round(simulation, 1)
    simulation.queue.clear()
    (first, in_time), (second, late) = sorted(due(simulation, TrainClient).items())
    simulation.tell(Report(RUN, do(in_time)[0]))
    assert due(simulation, TrainClient)[second] == late
    simulation.tell(Report(RUN, do(late)[0]))
    states = run_of(simulation).client_states
    assert states is not None
    assert states.newest == {first: state_of(1, first), second: state_of(1, second)}


def test_a_run_that_goes_back_begins_its_clients_anew_and_evaluates_what_is_owed() -> None:
    simulation = begun()
    while len(simulation.state.runs[RUN].commits) < 3:  # nobody evaluates meanwhile
        command = simulation.queue.popleft()
        if not isinstance(command.fact, ClientEvaluated):
            simulation.tell(command)
    simulation.queue.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=1))
    states = run_of(simulation).client_states
    owed_then = {1: {client: state_of(1, client) for client in range(4)}}
    assert states == ClientStates(owed=owed_then, is_incomplete=True)
    assert not simulation.state.runs[RUN].is_reproducible
    owed = {c: (e.base.segment, e.client_state) for c, e in due(simulation, EvaluateState).items()}
    assert owed == {client: (1, state_of(1, client)) for client in range(4)}
    until_round(simulation, 2)
    assert {e.state for e in due(simulation, TrainClient).values()} == {None}


def folds(simulation: Simulation) -> dict[int, bool]:
    """Whether the common variate begins anew, by round, to the end of the run."""
    found = {}
    while simulation.queue:
        for effect in pending(simulation.state):
            if isinstance(effect, AggregateRound):
                found[effect.round_num] = effect.is_control_anew
        simulation.tell(simulation.queue.popleft())
    assert phase(simulation) is RunPhase.COMPLETED
    return found


def test_a_correction_is_kept_from_round_to_round_and_no_evaluation_needs_it() -> None:
    simulation = begun(SCAFFOLD)
    until_round(simulation, 2)
    known = {c: e.state for c, e in due(simulation, TrainClient).items()}
    assert known == {c: state_of(1, c) for c in range(4)}
    states = run_of(simulation).client_states
    assert states is not None
    assert not states.owed
    assert folds(simulation) == {2: False, 3: False}
    assert simulation.state.runs[RUN].is_reproducible


def test_after_a_loss_all_corrections_begin_anew_together() -> None:
    simulation = begun(SCAFFOLD, rounds=4)
    until_round(simulation, 2)
    lost = ClientStateLost(party=ROOT, round_num=2, client=1, reason="no such file")
    simulation.tell(Report(RUN, lost))
    simulation.crash()
    known = {c: e.state for c, e in due(simulation, TrainClient).items()}
    assert known == {c: state_of(1, c) for c in range(4)}
    until_round(simulation, 3)
    assert {e.state for e in due(simulation, TrainClient).values()} == {None}


def test_the_round_of_a_loss_ends_without_corrections() -> None:
    simulation = begun(SCAFFOLD, rounds=4)
    until_round(simulation, 2)
    simulation.tell(
        Report(RUN, ClientStateLost(party=ROOT, round_num=2, client=1, reason="no such file"))
    )
    assert folds(simulation) == {2: True, 3: False, 4: False}


def test_a_run_that_goes_back_corrects_nothing_after_its_first_round() -> None:
    simulation = begun(SCAFFOLD, rounds=4)
    until_round(simulation, 3)
    simulation.queue.clear()
    simulation.tell(CancelRun(RUN))
    simulation.run()
    simulation.tell(ResumeRun(RUN, from_segment=1))
    assert folds(simulation) == {2: True, 3: False, 4: False}


def test_personal_layers_do_not_begin_anew_with_those_of_another_client() -> None:
    simulation = begun()
    until_round(simulation, 2)
    lost = ClientStateLost(party=ROOT, round_num=2, client=1, reason="no such file")
    simulation.tell(Report(RUN, lost))
    until_round(simulation, 3)
    known = {c: e.state for c, e in due(simulation, TrainClient).items()}
    assert known == {c: state_of(2, c) for c in range(4)}


def test_the_newest_states_of_simulated_clients_stay_in_the_store() -> None:
    """Those of sites lie there, and nobody here has them."""
    drawn = {"client_selection": {"method": "Random", "fraction": 0.5}, "rounds": 6}
    strategy = {**FEDERATED, **drawn, "options": SCAFFOLD}
    simulation = start(job_text(strategy, optimizer={"name": "sgd", "lr": 0.1}))
    simulation.tell(register("a"))
    until_round(simulation, 6)
    states = run_of(simulation).client_states
    assert states is not None
    kept = {state_of(state.round_num, client).digest for client, state in states.newest.items()}
    assert len(kept) > 2
    assert kept <= live_blobs(simulation.state)
    until_round(at_sites := begun(SCAFFOLD), 2)
    assert not live_blobs(at_sites.state) & {state_of(1, client).digest for client in range(4)}


@pytest.mark.parametrize("own", [PERSONAL, SCAFFOLD])
def test_a_site_that_can_keep_nothing_is_no_client_and_is_named(own: dict[str, Any]) -> None:
    strategy = {**FEDERATED, "options": own}
    sections: dict[str, Any] = {"optimizer": {"name": "sgd", "lr": 0.1}}
    simulation = start(job_text(strategy, data={"worker_local": "ward"}, **sections))
    for name in "abcd":
        simulation.tell(register(name, local_data=("ward",), keeps_nothing=name in "bd"))
    assert reason(simulation) == (
        "4 workers with data 'ward' are needed, 2 are here; b, d have no --data-dir, where clients "
        "of this job keep their states"
    )
    for name in "de":
        simulation.tell(register(name, local_data=("ward",)))
    simulation.run()
    assert {each.worker_id for each in run_of(simulation).roster} == {"a", "c", "d", "e"}


def test_a_site_may_keep_nothing_where_clients_need_not() -> None:
    simulation = start(job_text(FEDERATED, data={"worker_local": "ward"}))
    for name in "abcd":
        simulation.tell(register(name, local_data=("ward",), keeps_nothing=True))
    until_round(simulation, 1)
    assert len(run_of(simulation).roster) == 4
