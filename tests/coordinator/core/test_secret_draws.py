"""Runs whose clients are drawn in secret: readers get nothing that tells who was drawn."""

import re
from typing import Any

import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import LoseWorker, Report
from stratagem.coordinator.core.effect_failures import FailedTries
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    RoundAccounted,
    RoundClosed,
    RunCompleted,
    RunFailed,
    RunReleased,
    RunSubmitted,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.secret_draws import draws_in_secret, hides_draws, is_hidden, shown
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.archived_runs import at_rest
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.pending_effects import pending
from stratagem.coordinator.core.state_machine.run_view import view_of
from stratagem.coordinator.core.state_machine.strategy_boundary import (
    shown_status_of,
    status_of,
)
from stratagem.coordinator.observe.event_feed import Feed, FeedEvent
from stratagem.coordinator.observe.waiting_reasons import say_what_fails, say_what_is_missing
from tests.coordinator.core.jobs import FEDERATED, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do, member, start

pytestmark = pytest.mark.core

PRIVACY = {"clip": {"norm": 8.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
TEN = {**FEDERATED, "num_clients": 10, "client_selection": {"method": "Random", "fraction": 0.5}}
CLIENT = re.compile(r"\bclients? \d|\d of \d+ |(worker|client)_id.{0,5}\bb\b")


def secret(strategy: Any = TEN, **privacy: Any) -> Simulation:
    return start(job_text(strategy, privacy={**PRIVACY, **privacy}), "a", "b")


def in_round(simulation: Simulation, strategy: Any = TEN) -> list[TrainClient]:
    """Open the first round; its clients, none of which has answered."""
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    (account,) = pending(simulation.state)
    simulation.tell(Report(RUN, do(account)[0]))
    due = [effect for effect in pending(simulation.state) if isinstance(effect, TrainClient)]
    return sorted(due, key=lambda effect: effect.client)


@pytest.mark.parametrize(
    ("is_secret", "strategy", "privacy"),
    [
        (True, TEN, {}),
        (False, FEDERATED, {}),
        (False, TEN, {"sampling": "fixed"}),
        (False, TEN, {"noise": "seeded"}),
        (False, TEN, {"unit": "row"}),
        (False, TEN, None),
    ],
)
def test_a_draw_is_secret_where_the_accountant_counts_on_it(
    is_secret: bool, strategy: Any, privacy: Any
) -> None:
    section = None if privacy is None else {**PRIVACY, **privacy}
    job = JobSpec.from_json(job_text(strategy, privacy=section))
    assert draws_in_secret(job) is is_secret


def test_readers_count_only_the_facts_that_they_get() -> None:
    simulation = secret()
    simulation.run()
    run = simulation.state.runs[RUN]
    assert run.ended is RunPhase.COMPLETED
    kinds = [kind for _, kind, _, _ in simulation.journal[2:]]
    hidden = {"ClientsSelected", "ClientsAssigned", "UpdateReceived"}
    assert hidden <= set(kinds)
    assert run.num_shown == sum(kind not in hidden for kind in kinds) < run.num_facts
    resting = at_rest(world_of(simulation.state), run, 0.0)
    assert resting is not None
    ended, view = resting
    assert (ended.num_shown, hides_draws(ended)) == (run.num_shown, True)
    assert view.num_facts == run.num_shown
    plain = secret(noise="seeded")
    plain.run()
    assert plain.state.runs[RUN].num_hidden == 0


def test_what_is_shown_of_a_round_is_what_it_costs() -> None:
    simulation = secret()
    simulation.run()
    run = simulation.state.runs[RUN]
    (account, *_), (closed, *_) = simulation.facts(RoundAccounted), simulation.facts(RoundClosed)
    assert account.drawn
    assert closed.accepted
    told = shown(run, account)
    assert isinstance(told, RoundAccounted)
    assert (told.drawn, told.epsilon) == ((), account.epsilon)
    told = shown(run, closed)
    assert isinstance(told, RoundClosed)
    assert (told.accepted, told.metrics) == ((), closed.metrics)
    assert sentence(told).startswith("round 1 closed: its clients were drawn in secret: privacy.")
    (submitted,) = simulation.facts(RunSubmitted)
    assert shown(run, submitted) is submitted
    assert shown(None, closed) is closed
    plain = secret(noise="seeded")
    plain.run()
    assert shown(plain.state.runs[RUN], closed) is closed
    assert not is_hidden(run.job, closed)


def test_the_status_of_an_open_round_names_and_counts_no_client() -> None:
    simulation = secret()
    clients = in_round(simulation)
    simulation.tell(Report(RUN, do(clients[0])[0]))
    simulation.tell(LoseWorker(member("b"), "is gone"))
    simulation.tell(LoseWorker(member("a"), "is gone"))
    world, run = world_of(simulation.state), simulation.state.runs[RUN]
    assert CLIENT.search(status_of(run, world).reason)
    status = shown_status_of(run, world)
    assert (status.phase, status.strategy_phase) == (RunPhase.RUNNING, "TRAINING")
    assert (status.num_clients, status.num_clients_done, status.members) == (0, 0, ())
    assert not CLIENT.search(view_of(world, run, 0.0).model_dump_json())

    async def no_history(*_: Any) -> list[Any]:
        return []

    feed = Feed(no_history)
    feed.add_event(RUN, FeedEvent(0, 0.0, RunReleased(), RunPhase.RUNNING), is_last=False)
    say_what_is_missing(feed, simulation.state, world, {RUN})
    progress = feed.progress(RUN)
    assert progress is None or not CLIENT.search(progress.reason)
    away = UnavailableError("worker a does not answer")
    tries = FailedTries().and_another(clients[0], [away], str(away), 0.0)
    say_what_fails(feed, simulation.state, clients[0], tries)
    assert feed.trouble(RUN).startswith(
        "the training of a client keeps failing and is tried again; its clients were drawn in "
        "secret (tried 1 times since 1970"
    )


def rejected(client: int) -> UpdateRejected:
    cause, reason = Cause.EXCEPTION, "KeyError: 'label'"
    return UpdateRejected(party="", round_num=1, client=client, reason=reason, cause=cause)  # type: ignore[arg-type]


def test_the_end_of_a_run_names_no_client_that_has_failed() -> None:
    simulation = secret()
    client = in_round(simulation)[0].client
    simulation.tell(Report(RUN, rejected(client)))
    for effect in in_round_left(simulation):
        simulation.tell(Report(RUN, do(effect)[0]))
    simulation.run()
    (completed,) = simulation.facts(RunCompleted)
    assert completed.reason == "3 rounds committed"


def in_round_left(simulation: Simulation) -> list[TrainClient]:
    return [effect for effect in pending(simulation.state) if isinstance(effect, TrainClient)]


def test_a_run_that_may_lose_no_client_fails_without_a_name() -> None:
    simulation = secret({**TEN, "options": {"on_client_error": "fail"}})
    client = in_round(simulation)[0].client
    simulation.tell(Report(RUN, rejected(client)))
    (failed,) = simulation.facts(RunFailed)
    assert failed.error is None
    assert failed.reason == (
        "round 1 cannot be closed as the job asks: clients have failed, or are too few; its "
        "clients were drawn in secret, so only the journal says which"
    )
