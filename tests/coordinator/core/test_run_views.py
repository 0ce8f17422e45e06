"""What people are shown of a run at every point of its life, under each strategy: its phase, its
counts, and, where clients are drawn in secret, nothing that tells who was drawn."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun
from stratagem.coordinator.core.decide import world_of
from stratagem.coordinator.core.effect_failures import FailedTries
from stratagem.coordinator.core.effects import AccountRound, TrainClient
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.run_view import RunView, at_rest, phase_of, phase_then, view_of
from stratagem.coordinator.core.strategy_calls import (
    draws_in_secret,
    hides_draws,
    is_hidden,
    shown_status_of,
    status_of,
    without_draws,
)
from stratagem.coordinator.core.strategy_contract import RunCounts
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.observe.feed import (
    Feed,
    FeedEvent,
    Paces,
    SegmentProgress,
    publish_counts,
    say_what_fails,
    say_what_is_missing,
)
from stratagem.coordinator.service.queries import progress
from tests.coordinator.core.jobs import (
    DATA_PARALLEL,
    EVALUATION,
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    evaluation_only,
    job_text,
    population,
    silos,
)
from tests.coordinator.core.simulation import RUN, Simulation, do, opened, rejected, start, trained

pytestmark = pytest.mark.core


JOBS = {
    "Local": job_text(LOCAL, evaluation=EVALUATION),
    "DataParallel": job_text(DATA_PARALLEL),
    "Federated": job_text(FEDERATED, evaluation={**EVALUATION, "every": "1 round"}),
    "Silos": job_text(silos()),
    "Population": job_text(population(generations=2), **POPULATION_SECTIONS),
    "Evaluation": evaluation_only(LOCAL),
}
PHASES = {
    "Local": ["WAITING", "BUILDING", "TRAINING", "COMMITTING", ""],
    "DataParallel": ["WAITING", "BUILDING", "TRAINING", "COMMITTING", ""],
    "Federated": ["WAITING", "BUILDING", "TRAINING", "AGGREGATING", "SELECTING", ""],
    "Silos": ["WAITING", "BUILDING", "TRAINING", "AGGREGATING", ""],
    "Population": ["WAITING", "TRAINING", ""],
    "Evaluation": ["WAITING", "BUILDING", "EVALUATING", ""],
}
"""What the strategies call what a run does, in the order in which it comes first."""


def view(simulation: Simulation) -> RunView:
    return view_of(world_of(simulation.state), simulation.record, 7.0)


def views(simulation: Simulation) -> Iterator[RunView]:
    """The view after each thing that happens, until nothing does any more."""
    yield view(simulation)
    while simulation.queue:
        simulation.step()
        yield view(simulation)


@pytest.mark.parametrize("name", JOBS)
def test_it_tells_what_a_run_does_from_its_placement_to_its_end(name: str) -> None:
    simulation = start(JOBS[name])
    waiting = view(simulation)
    assert (waiting.phase, waiting.worker_ids) == (RunPhase.PLACING, ())
    assert "no worker is registered" in waiting.reason
    simulation.come("abcd")
    seen = [waiting, *views(simulation)]
    assert list(dict.fromkeys(each.strategy_phase for each in seen)) == PHASES[name]
    assert [each.step for each in seen] == sorted(each.step for each in seen)
    for each in seen[:-1]:
        assert each.phase is RunPhase.PLACING or each.worker_ids or not each.strategy_phase
        assert each.ended_at_s == (7.0 if each.phase is RunPhase.COMPLETED else 0.0)
    end = seen[-1]
    assert (end.phase, end.worker_ids) == (RunPhase.COMPLETED, ())
    assert (end.step, end.segment) == (end.num_steps, end.num_segments)


def test_commits_are_shown_with_the_best_and_the_final_one_and_whose_state_they_are() -> None:
    simulation = start(job_text(LOCAL, evaluation={**EVALUATION, "mode": "min"}, retention=1), "a")
    *_, end = views(simulation)
    kept = {each.segment: (each.is_best, each.is_final) for each in end.commits}
    assert kept == {1: (True, False), 2: (False, True)}, "accuracy grows with the steps"
    *_, end = views(start(JOBS["Population"], "a"))
    for commit in end.commits:
        assert commit.member in range(4)
        assert commit.schedule[-1].values.keys() == {"optimizer.lr"}


@pytest.mark.parametrize(
    ("planes", "told"), [(("tls", "tls"), "tls"), (("tls", "trusted"), "trusted"), (("", ""), "")]
)
def test_tensors_are_called_secured_where_all_workers_say_so(
    planes: tuple[str, str], told: str
) -> None:
    simulation = start(job_text(DATA_PARALLEL))
    assert view(simulation).data_plane == "", "it has no workers"
    for name, plane in zip("ab", planes, strict=True):
        simulation.come([name], data_plane=plane)
    assert view(simulation).worker_ids == ("a", "b")
    assert view(simulation).data_plane == told


def test_a_run_without_its_workers_recovers_and_tells_of_it() -> None:
    simulation = start(JOBS["Federated"], "a")
    simulation.step()
    simulation.lose("a")
    away = view(simulation)
    assert (away.phase, away.strategy_phase) == (RunPhase.RECOVERING, "TRAINING")
    assert away.reason == (
        "round 1: 0 of 4 clients have answered; without a worker: "
        "client 0 (a), client 1 (a), client 2 (a), client 3 (a)"
    )


def test_the_phase_of_a_run_after_an_old_fact() -> None:
    simulation = start(JOBS["Local"], "a")
    assert phase_of(world_of(simulation.state), simulation.record) is RunPhase.RUNNING
    simulation.tell(CancelRun(RUN))
    assert phase_of(world_of(simulation.state), simulation.record) is RunPhase.CANCELLED
    assert phase_then(f.RunCancelled(reason="enough")) is RunPhase.CANCELLED
    assert phase_then(f.RunFailed(reason="it raised")) is RunPhase.FAILED
    assert phase_then(f.RunCompleted(reason="20 steps")) is RunPhase.COMPLETED
    assert phase_then(simulation.fact(f.RunCancelled)).is_terminal
    assert not phase_then(simulation.fact(f.MembersFormed)).is_terminal


# ---- what is counted besides steps: epochs, clients of a round, the best of a population ----


def counts(simulation: Simulation) -> RunCounts:
    return status_of(simulation.record, world_of(simulation.state)).counts


def test_a_run_of_steps_says_how_many_make_an_epoch() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert counts(simulation) == RunCounts(), "before the rows are known"
    simulation.step()
    assert counts(simulation) == RunCounts(steps_per_epoch=10)
    only = start(evaluation_only(LOCAL), "a")
    only.step()
    assert counts(only) == RunCounts()


def test_a_round_counts_its_clients_and_weighs_their_losses() -> None:
    simulation = opened(FEDERATED, "a", "b", "c", "d")
    assert counts(simulation) == RunCounts(unit="rounds")
    for effect, rows, loss in zip(trained(simulation)[:2], (10, 30), (4.0, 2.0), strict=True):
        told = {"num_samples": rows, "loss": loss}
        simulation.report(do(effect).model_copy(update=told))
    simulation.report(rejected(2, "not finite"))
    seen = status_of(simulation.record, world_of(simulation.state))
    assert (seen.num_clients_done, seen.num_clients) == (3, 4)
    assert seen.counts == RunCounts(
        unit="rounds", part_done=3 / 5, loss=2.5, num_clients_rejected=1
    ), "by rows: (10 * 4 + 30 * 2) / 40"
    simulation = start(job_text(FEDERATED), "a", "b", "c", "d")
    simulation.until(f.RoundClosed)
    loss = simulation.fact(f.RoundClosed).metrics["train.loss"]
    assert counts(simulation).loss == loss > 0, "between rounds it is that of the last one"


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_population_names_its_best_member_and_counts_copies(mode: str) -> None:
    evaluation = {**POPULATION_SECTIONS["evaluation"], "mode": mode}
    sections = {**POPULATION_SECTIONS, "evaluation": evaluation}
    simulation = start(job_text(population(), **sections), "a", "b")
    assert counts(simulation) == RunCounts(unit="generations")
    simulation.until(f.SegmentFinished)
    while not simulation.facts(f.GenerationClosed):
        before = counts(simulation)
        simulation.step()
    closed = simulation.fact(f.GenerationClosed)
    assert 0 < before.part_done < 1
    now = counts(simulation)
    assert now.best == closed.metrics["test.accuracy"]
    assert (now.best_member, now.num_copied) == (closed.best, len(closed.copied))
    assert (now.num_copied, now.is_even, now.part_done) == (1, True, 0.0)
    assert now.loss > 0


def test_members_that_do_not_wait_for_each_other_have_no_pace() -> None:
    simulation = start(job_text(population(asynchronous=True), **POPULATION_SECTIONS), "a", "b")
    simulation.until(f.GenerationClosed)
    now = counts(simulation)
    assert (now.is_even, now.part_done, now.num_copied) == (False, 0.0, 0)
    assert now.best is not None


def shown_by(simulation: Simulation, paces: Paces, item: SegmentProgress) -> Any:
    return progress(paces, world_of(simulation.state), simulation.record, item)


def test_progress_tells_the_time_by_the_clocks_of_the_process() -> None:
    simulation = start(job_text(LOCAL, evaluation={**EVALUATION, "stop": {"patience": 3}}), "a")
    simulation.alone()
    run, world, now = simulation.record, world_of(simulation.state), [0.0]
    paces = Paces(lambda: now[0], lambda: run.submitted_wall_s + 7.0)
    assert not shown_by(simulation, paces, SegmentProgress(1)).HasField("eta_s")
    for number in range(21):
        now[0] = number
        paces.look(world, run, SegmentProgress(number // 2))
        paces.look(world, run, SegmentProgress(19))  # too soon after the last look
    item = shown_by(simulation, paces, SegmentProgress(10, loss=0.5, lr=0.1))
    assert (item.eta_s, item.epoch, item.elapsed_s) == (20.0, 1.0, 7.0)
    assert (item.may_end_early, item.unit, item.lr, item.loss) == (True, "steps", 0.1, 0.5)
    assert not item.HasField("best")
    assert not item.HasField("best_member")
    paces.forget(RUN)
    assert not shown_by(simulation, paces, SegmentProgress(10)).HasField("eta_s")


def test_runs_that_count_rounds_show_what_a_fact_has_changed() -> None:
    simulation = opened(FEDERATED, "a", "b", "c", "d")
    feed = Feed(history=None)  # type: ignore[arg-type]  # nothing is read back here
    feed.add_event(RUN, FeedEvent(0, 0.0, rejected(0), RunPhase.RUNNING), is_last=False)
    publish_counts(feed, simulation.state, world_of(simulation.state), {RUN})
    published = feed.progress(RUN)
    assert published is not None
    item = shown_by(simulation, Paces(), published)
    assert (item.unit, item.num_steps) == ("rounds", 3)
    assert (item.num_clients, item.num_clients_done) == (4, 0)
    alone = start(job_text(LOCAL), "a")
    alone.step()
    feed.set_progress(RUN, None)
    publish_counts(feed, alone.state, world_of(alone.state), {RUN})
    assert feed.progress(RUN) is None, "it has steps of its own"


# ---- runs whose clients are drawn in secret ----


PRIVACY = {"clip": {"norm": 8.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
TEN = {**FEDERATED, "num_clients": 10, "client_selection": {"method": "Random", "fraction": 0.5}}
CLIENT = re.compile(r"\bclients? \d|\d of \d+ |(worker|client)_id.{0,5}\bb\b")


def secret(strategy: Any = TEN, **privacy: Any) -> Simulation:
    return start(job_text(strategy, privacy={**PRIVACY, **privacy}), "a", "b")


def in_round(simulation: Simulation) -> list[TrainClient]:
    """Open the first round; its clients, none of which has answered."""
    simulation.alone()
    simulation.report(do(simulation.due_one(AccountRound)))
    return trained(simulation)


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
    simulation.complete()
    run, kinds = simulation.record, simulation.kinds()[2:]
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
    assert plain.record.num_hidden == 0


def test_what_is_shown_of_a_round_is_what_it_costs() -> None:
    simulation = secret()
    simulation.run()
    run = simulation.record
    (account, *_), (closed, *_) = (
        simulation.facts(f.RoundAccounted),
        simulation.facts(f.RoundClosed),
    )
    assert account.drawn
    assert closed.accepted
    told = without_draws(run, account)
    assert isinstance(told, f.RoundAccounted)
    assert (told.drawn, told.epsilon) == ((), account.epsilon)
    told = without_draws(run, closed)
    assert isinstance(told, f.RoundClosed)
    assert (told.accepted, told.metrics) == ((), closed.metrics)
    assert sentence(told).startswith("round 1 closed: its clients were drawn in secret: privacy.")
    submitted = simulation.fact(f.RunSubmitted)
    assert without_draws(run, submitted) is submitted
    assert without_draws(None, closed) is closed
    plain = secret(noise="seeded")
    plain.run()
    assert without_draws(plain.record, closed) is closed
    assert not is_hidden(run.job, closed)


def test_the_status_of_an_open_round_names_and_counts_no_client() -> None:
    simulation = secret()
    clients = in_round(simulation)
    simulation.report(do(clients[0]))
    simulation.lose("ba", reason="is gone")
    world, run = world_of(simulation.state), simulation.record
    assert CLIENT.search(status_of(run, world).reason)
    status = shown_status_of(run, world)
    assert (status.phase, status.strategy_phase) == (RunPhase.RUNNING, "TRAINING")
    assert (status.num_clients, status.num_clients_done, status.members) == (0, 0, ())
    assert not CLIENT.search(view_of(world, run, 0.0).model_dump_json())
    feed = Feed(history=None)  # type: ignore[arg-type]  # nothing is read back here
    feed.add_event(RUN, FeedEvent(0, 0.0, f.RunReleased(), RunPhase.RUNNING), is_last=False)
    say_what_is_missing(feed, simulation.state, world, {RUN})
    told = feed.progress(RUN)
    assert told is None or not CLIENT.search(told.reason)
    away = UnavailableError("worker a does not answer")
    tries = FailedTries().and_another(clients[0], [away], str(away), 0.0)
    say_what_fails(feed, simulation.state, clients[0], tries)
    assert feed.trouble(RUN).startswith(
        "the training of a client keeps failing and is tried again; its clients were drawn in "
        "secret (tried 1 times since 1970"
    )


@pytest.mark.parametrize("may_fail", [True, False])
def test_the_end_of_a_run_names_no_client_that_has_failed(may_fail: bool) -> None:
    simulation = secret(TEN if may_fail else {**TEN, "options": {"on_client_error": "fail"}})
    simulation.report(rejected(in_round(simulation)[0].client))
    if may_fail:
        simulation.report(*map(do, trained(simulation)))
        simulation.run()
        assert simulation.fact(f.RunCompleted).reason == "3 rounds committed"
        return
    failed = simulation.fact(f.RunFailed)
    assert failed.error is None
    assert failed.reason == (
        "round 1 cannot be closed as the job asks: clients have failed, or are too few; its "
        "clients were drawn in secret, so only the journal says which"
    )
