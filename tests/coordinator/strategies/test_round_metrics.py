"""What is said of the training of a federated round is of all accepted updates, in any order."""

import itertools
from math import isclose, isnan, nan
from typing import Any

import pytest

from stratagem.common.base.ids import Digest
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import Report
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.strategies.federated.evaluation import mean_loss, round_metrics
from tests.coordinator.core.jobs import FEDERATED, POPULATION_SECTIONS, job_text, population, silos
from tests.coordinator.core.simulation import RUN, Simulation, opened, rejected, start

pytestmark = pytest.mark.core


def update(client: int, loss: float, *, norm: float, skipped: int, sent: int) -> f.UpdateReceived:
    of: dict[str, Any] = {"party": f.ROOT, "round_num": 1, "client": client, "loss": loss}
    of |= {"digest": Digest("d" * 64), "seconds": 0.1, "num_steps": 5}
    of |= {"traffic": {"sent_bytes": sent, "uncompressed_bytes": 100}}
    of |= {"metrics": {"train.max_grad_norm": norm, "train.skipped_steps": skipped}}
    return f.UpdateReceived(**of, num_samples=10 * (client + 1))


UPDATES = (
    update(0, 4.0, norm=1.0, skipped=1, sent=7),
    update(1, 1.0, norm=9.0, skipped=0, sent=8),
    update(2, 2.0, norm=3.0, skipped=2, sent=9),
)
MEAN = 2.0
EXPECTED = {
    "train.loss": MEAN,
    "train.loss_max": 4.0,
    "train.loss_min": 1.0,
    "train.loss_std": 1.0,
    "train.max_grad_norm": 9.0,
    "train.sent_bytes": 24.0,
    "train.skipped_steps": 3.0,
    "train.uncompressed_bytes": 300.0,
}


def answered(*updates: f.Fact) -> Simulation:
    """A run whose first round has had these answers."""
    simulation = opened({**FEDERATED, "num_clients": 3}, "a")
    simulation.report(*updates)
    return simulation


def changed(number: int, **changes: Any) -> f.UpdateReceived:
    return UPDATES[number].model_copy(update=changes)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_round_reports_all_its_updates_in_any_order(order: tuple[int, ...]) -> None:
    simulation = answered(*(UPDATES[client] for client in order))
    closed = simulation.fact(f.RoundClosed)
    assert closed.metrics == EXPECTED
    assert simulation.record.metrics == EXPECTED
    assert ": 3 of 3 updates: train.loss 2, train.loss_max 4, train.loss_min 1" in sentence(closed)
    simulation.crash()


def test_a_rejected_client_has_no_part_in_it_and_a_single_update_says_nothing() -> None:
    assert not answered(UPDATES[1]).record.metrics
    metrics = answered(UPDATES[2], rejected(1, "not finite"), UPDATES[0]).record.metrics
    assert metrics["train.loss"] == (10 * 4.0 + 30 * 2.0) / 40
    assert (metrics["train.loss_min"], metrics["train.loss_max"]) == (2.0, 4.0)
    assert (metrics["train.max_grad_norm"], metrics["train.sent_bytes"]) == (3.0, 16.0)


def test_skipped_steps_are_those_since_the_beginning_and_bytes_those_of_the_round() -> None:
    simulation = answered(*UPDATES)
    simulation.step()
    simulation.report(*(changed(number, round_num=2) for number in range(3)))
    metrics = simulation.record.metrics
    assert (metrics["train.skipped_steps"], metrics["train.sent_bytes"]) == (6.0, 24.0)


def test_late_updates_count_but_for_their_loss_and_what_some_say_is_their_mean() -> None:
    found = round_metrics({0: UPDATES[0], 2: UPDATES[2]}, [UPDATES[1]])
    assert found["train.loss"] == (10 * 4.0 + 30 * 2.0) / 40
    assert (found["train.max_grad_norm"], found["train.sent_bytes"]) == (9.0, 24.0)
    first, last = (changed(n, metrics={"train.share": n + 1.0}) for n in (0, 2))
    found = round_metrics({0: first, 1: UPDATES[1], 2: last})
    assert isclose(found["train.share"], (10 * 1.0 + 30 * 3.0) / 40)


def test_a_client_whose_site_keeps_its_loss_is_not_in_the_mean() -> None:
    silent = UPDATES[1].model_copy(update={"loss": nan})
    stored = f.UpdateReceived.model_validate_json(silent.model_dump_json())
    assert isnan(stored.loss)
    found = round_metrics({0: UPDATES[0], 1: stored, 2: UPDATES[2]})
    assert found["train.loss"] == (10 * 4.0 + 30 * 2.0) / 40
    assert (found["train.loss_min"], found["train.loss_max"]) == (2.0, 4.0)
    assert found["train.sent_bytes"] == 24.0
    assert mean_loss({0: UPDATES[0], 1: stored}) == 4.0
    assert mean_loss({1: stored}) == 0.0


def test_one_client_is_its_own_mean_and_updates_over_no_rows_have_none() -> None:
    found = round_metrics({1: UPDATES[1]})
    assert (found["train.loss"], found["train.loss_std"]) == (1.0, 0.0)
    found = round_metrics({number: changed(number, num_samples=0) for number in range(3)}, (), 0)
    assert not any(name.startswith("train.loss") for name in found)
    assert found["train.sent_bytes"] == 24.0


def test_silos_report_the_mean_of_their_updates() -> None:
    simulation = start(job_text(silos(rounds=1)), *"abcd")
    while simulation.queue:
        fact = simulation.queue.popleft().fact
        if isinstance(fact, f.UpdateReceived):
            assert (fact.num_steps, fact.metrics) == (10, {"train.skipped_steps": 1})
            fact = fact.model_copy(update={"loss": float(fact.client)})
        simulation.tell(Report(RUN, fact))
    metrics = simulation.record.metrics
    assert (metrics["train.loss"], metrics["train.loss_max"]) == (0.5, 1.0)
    assert metrics["train.skipped_steps"] == 2.0


def test_a_population_over_federations_reports_the_round_of_its_best_member() -> None:
    inner = {**FEDERATED, "num_clients": 2, "rounds": 1}
    strategy = population(2, 1, inner, {"method": "Truncation", "fraction": 0.5})
    evaluation = {"metrics": [], "best": "loss", "mode": "min"}
    sections = {**POPULATION_SECTIONS, "steps_per_generation": 1, "evaluation": evaluation}
    simulation = start(job_text(strategy, **sections), "a")
    simulation.run()
    assert simulation.fact(f.GenerationClosed).metrics["train.loss"] == 0.5


def test_a_journal_without_numbers_of_steps_replays_as_it_was() -> None:
    """Earlier versions took the newest update for all; what they have journaled replays so."""
    simulation = answered(*(changed(number, num_steps=0) for number in (0, 1)))
    metrics = simulation.record.metrics
    assert (metrics["train.loss"], metrics["train.skipped_steps"]) == (1.0, 1.0)
    simulation.report(UPDATES[2])  # of this version
    metrics = simulation.record.metrics
    assert (metrics["train.loss"], metrics["train.skipped_steps"]) == (MEAN, 3.0)
    for told, skipped in (({}, 0), ({"train.skipped_steps": 2}, 4)):
        state = opened(FEDERATED, "a").state
        for client in (0, 1):
            old = changed(0, client=client, num_steps=0, metrics=told)
            state = apply(state, RUN, old, 1.0)
        found = state.runs[RUN].metrics
        assert (found["train.loss"], found.get("train.skipped_steps", 0)) == (4.0, skipped)
