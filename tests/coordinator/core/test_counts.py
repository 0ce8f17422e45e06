"""What a status counts besides steps: epochs, clients of a round, the best of a population."""

from typing import Any

import pytest

from stratagem.coordinator.core.commands import Report
from stratagem.coordinator.core.facts import (
    ROOT,
    GenerationClosed,
    RoundClosed,
    SegmentFinished,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.decide import world_of
from stratagem.coordinator.core.state_machine.strategy_boundary import status_of
from stratagem.coordinator.core.strategy_contract import RunCounts, Status
from stratagem.coordinator.observe.counted_progress import publish_counts
from stratagem.coordinator.observe.event_feed import Feed, FeedEvent, SegmentProgress
from stratagem.coordinator.observe.run_paces import Paces
from stratagem.coordinator.service.protobuf_views import progress
from tests.coordinator.core.jobs import (
    EVALUATION,
    FEDERATED,
    LOCAL,
    POPULATION_SECTIONS,
    evaluation_only,
    job_text,
    population,
)
from tests.coordinator.core.simulation import RUN, Simulation, start
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core


def status(simulation: Simulation) -> Status:
    return status_of(simulation.state.runs[RUN], world_of(simulation.state))


def test_a_run_of_steps_says_how_many_make_an_epoch() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert status(simulation).counts == RunCounts(), "before the rows are known"
    simulation.tell(simulation.queue.popleft())
    assert status(simulation).counts == RunCounts(steps_per_epoch=10)
    only = start(evaluation_only(LOCAL), "a")
    only.tell(only.queue.popleft())
    assert status(only).counts == RunCounts()


def test_a_round_counts_its_clients_and_weighs_their_losses() -> None:
    simulation = opened(FEDERATED, "a", "b", "c", "d")
    assert status(simulation).counts == RunCounts(unit="rounds")
    for effect, rows, loss in zip(trained(simulation)[:2], (10, 30), (4.0, 2.0), strict=True):
        fact = UpdateReceived(
            party=ROOT,
            round_num=1,
            client=effect.client,
            digest=effect.base.digest,
            num_samples=rows,
            loss=loss,
            seconds=1.0,
            num_steps=1,
        )
        simulation.tell(Report(RUN, fact))
    refused = UpdateRejected(party=ROOT, round_num=1, client=2, reason="not finite")
    simulation.tell(Report(RUN, refused))
    shown = status(simulation)
    assert (shown.num_clients_done, shown.num_clients) == (3, 4)
    assert shown.counts == RunCounts(
        unit="rounds", part_done=3 / 5, loss=2.5, num_clients_rejected=1
    ), "by rows: (10 * 4 + 30 * 2) / 40"


def test_between_rounds_the_loss_is_that_of_the_last_one() -> None:
    simulation = start(job_text(FEDERATED), "a", "b", "c", "d")
    while not simulation.facts(RoundClosed):
        simulation.tell(simulation.queue.popleft())
    (closed,) = simulation.facts(RoundClosed)
    assert status(simulation).counts.loss == closed.metrics["train.loss"] > 0


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_population_names_its_best_member_and_counts_copies(mode: str) -> None:
    evaluation = {**POPULATION_SECTIONS["evaluation"], "mode": mode}
    simulation = start(
        job_text(population(), **{**POPULATION_SECTIONS, "evaluation": evaluation}), "a", "b"
    )
    assert status(simulation).counts == RunCounts(unit="generations")
    while not simulation.facts(SegmentFinished):
        simulation.tell(simulation.queue.popleft())
    while not simulation.facts(GenerationClosed):
        before = status(simulation).counts
        simulation.tell(simulation.queue.popleft())
    (closed,) = simulation.facts(GenerationClosed)
    assert 0 < before.part_done < 1
    counts = status(simulation).counts
    assert counts.best == closed.metrics["test.accuracy"]
    assert (counts.best_member, counts.num_copied) == (closed.best, len(closed.copied))
    assert counts.num_copied == 1
    assert (counts.is_even, counts.part_done) == (True, 0.0)
    assert counts.loss > 0


def test_members_that_do_not_wait_for_each_other_have_no_pace() -> None:
    simulation = start(job_text(population(asynchronous=True), **POPULATION_SECTIONS), "a", "b")
    while not simulation.facts(GenerationClosed):
        simulation.tell(simulation.queue.popleft())
    counts = status(simulation).counts
    assert (counts.is_even, counts.part_done, counts.num_copied) == (False, 0.0, 0)
    assert counts.best is not None


# ---- what is made of it, with clocks ----


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shown_by(simulation: Simulation, paces: Paces, item: SegmentProgress) -> Any:
    run = simulation.state.runs[RUN]
    return progress(paces, world_of(simulation.state), run, item)


def test_progress_tells_the_time_by_the_clocks_of_the_process() -> None:
    clock = Clock()
    simulation = start(job_text(LOCAL, evaluation={**EVALUATION, "stop": {"patience": 3}}), "a")
    simulation.tell(simulation.queue.popleft())
    simulation.queue.clear()
    run, world = simulation.state.runs[RUN], world_of(simulation.state)
    paces = Paces(clock, lambda: run.submitted_wall_s + 7.0)
    assert not shown_by(simulation, paces, SegmentProgress(1)).HasField("eta_s")
    for number in range(21):
        clock.now_s = number
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
    feed.add_event(
        RUN,
        FeedEvent(
            0, 0.0, UpdateRejected(party=ROOT, round_num=1, client=0, reason="x"), RunPhase.RUNNING
        ),
        is_last=False,
    )
    publish_counts(feed, simulation.state, world_of(simulation.state), {RUN})
    shown = feed.progress(RUN)
    assert shown is not None
    item = shown_by(simulation, Paces(), shown)
    assert (item.unit, item.num_steps, item.num_clients, item.num_clients_done) == (
        "rounds",
        3,
        4,
        0,
    )
    alone = start(job_text(LOCAL), "a")
    alone.tell(alone.queue.popleft())
    feed.set_progress(RUN, None)
    publish_counts(feed, alone.state, world_of(alone.state), {RUN})
    assert feed.progress(RUN) is None, "it has steps of its own"
