"""What is said of the training of a federated round is of all accepted updates, in any order."""

import itertools
from dataclasses import replace
from math import isclose, isnan, nan

import pytest

from stratagem.common.base.ids import Digest
from stratagem.coordinator.core.commands import Report
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    Fact,
    GenerationClosed,
    RoundClosed,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.strategies.federated.round_metrics import mean_loss, round_metrics
from tests.coordinator.core.jobs import FEDERATED, job_text, silos
from tests.coordinator.core.simulation import RUN, Simulation, do, start
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core


def update(client: int, loss: float, *, norm: float, skipped: int, sent: int) -> UpdateReceived:
    return UpdateReceived(
        party=ROOT,
        round_num=1,
        client=client,
        digest=Digest("d" * 64),
        num_samples=10 * (client + 1),
        loss=loss,
        seconds=0.1,
        num_steps=5,
        traffic={"sent_bytes": sent, "uncompressed_bytes": 100},
        metrics={"train.max_grad_norm": norm, "train.skipped_steps": skipped},
    )


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


def answered(*updates: Fact) -> Simulation:
    """A run whose first round has had these answers; the other clients' updates are rejected."""
    simulation = opened({**FEDERATED, "num_clients": 3}, "a")
    for fact in updates:
        simulation.tell(Report(RUN, fact))
    return simulation


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_round_reports_all_its_updates_in_any_order(order: tuple[int, ...]) -> None:
    simulation = answered(*(UPDATES[client] for client in order))
    (closed,) = simulation.facts(RoundClosed)
    assert isinstance(closed, RoundClosed)
    assert closed.metrics == EXPECTED
    assert simulation.state.runs[RUN].metrics == EXPECTED
    assert ": 3 of 3 updates: train.loss 2, train.loss_max 4, train.loss_min 1" in sentence(closed)
    simulation.crash()
    assert simulation.state.runs[RUN].metrics == EXPECTED


def test_a_single_update_says_nothing_of_the_round() -> None:
    assert not answered(UPDATES[1]).state.runs[RUN].metrics


def test_a_rejected_client_has_no_part_in_it() -> None:
    rejected = UpdateRejected(party=ROOT, round_num=1, client=1, reason="not finite")
    simulation = answered(UPDATES[2], rejected, UPDATES[0])
    metrics = simulation.state.runs[RUN].metrics
    assert metrics["train.loss"] == (10 * 4.0 + 30 * 2.0) / 40
    assert (metrics["train.loss_min"], metrics["train.loss_max"]) == (2.0, 4.0)
    assert metrics["train.max_grad_norm"] == 3.0
    assert metrics["train.sent_bytes"] == 16.0


def test_skipped_steps_are_those_since_the_beginning_and_bytes_those_of_the_round() -> None:
    simulation = answered(*UPDATES)
    simulation.tell(simulation.queue.popleft())
    for fact in UPDATES:
        simulation.tell(Report(RUN, fact.model_copy(update={"round_num": 2})))
    metrics = simulation.state.runs[RUN].metrics
    assert (metrics["train.skipped_steps"], metrics["train.sent_bytes"]) == (6.0, 24.0)


def test_late_updates_count_their_bytes_and_norms_but_not_their_loss() -> None:
    found = round_metrics({0: UPDATES[0], 2: UPDATES[2]}, [UPDATES[1]])
    assert found["train.loss"] == (10 * 4.0 + 30 * 2.0) / 40
    assert (found["train.max_grad_norm"], found["train.sent_bytes"]) == (9.0, 24.0)


def test_what_only_some_clients_say_is_their_mean_over_rows() -> None:
    first = UPDATES[0].model_copy(update={"metrics": {"train.share": 1.0}})
    last = UPDATES[2].model_copy(update={"metrics": {"train.share": 3.0}})
    found = round_metrics({0: first, 1: UPDATES[1], 2: last})
    assert isclose(found["train.share"], (10 * 1.0 + 30 * 3.0) / 40)


def test_a_client_whose_site_keeps_its_loss_is_not_in_the_mean() -> None:
    silent = UPDATES[1].model_copy(update={"loss": nan})
    stored = UpdateReceived.model_validate_json(silent.model_dump_json())
    assert isnan(stored.loss)
    found = round_metrics({0: UPDATES[0], 1: stored, 2: UPDATES[2]})
    assert found["train.loss"] == (10 * 4.0 + 30 * 2.0) / 40
    assert (found["train.loss_min"], found["train.loss_max"]) == (2.0, 4.0)
    assert found["train.sent_bytes"] == 24.0
    assert mean_loss({0: UPDATES[0], 1: stored}) == 4.0
    assert mean_loss({1: stored}) == 0.0


def test_one_client_is_its_own_mean_without_spread() -> None:
    found = round_metrics({1: UPDATES[1]})
    assert (found["train.loss"], found["train.loss_std"]) == (1.0, 0.0)


def test_a_journal_without_numbers_of_steps_replays_as_it_was() -> None:
    """Earlier versions showed the newest update; what they have journaled replays to the same."""
    old = [fact.model_copy(update={"num_steps": 0}) for fact in UPDATES]
    simulation = opened({**FEDERATED, "num_clients": 3}, "a")
    for fact in old[:2]:
        simulation.tell(Report(RUN, fact))
    metrics = simulation.state.runs[RUN].metrics
    assert (metrics["train.loss"], metrics["train.skipped_steps"]) == (1.0, 1.0)
    simulation.tell(Report(RUN, UPDATES[2]))  # of this version
    metrics = simulation.state.runs[RUN].metrics
    assert metrics["train.loss"] == MEAN
    assert metrics["train.skipped_steps"] == 3.0


def test_silos_report_the_mean_of_their_updates() -> None:
    simulation = start(job_text(silos(rounds=1)), *"abcd")
    for _ in range(1000):
        if not simulation.queue:
            break
        command = simulation.queue.popleft()
        if isinstance(command, Report) and isinstance(command.fact, UpdateReceived):
            assert (command.fact.num_steps, command.fact.metrics) == (
                10,
                {"train.skipped_steps": 1},
            )
            loss = float(command.fact.client)
            fact = command.fact.model_copy(update={"loss": loss})
            command = replace(command, fact=fact)
        simulation.tell(command)
    metrics = simulation.state.runs[RUN].metrics
    assert (metrics["train.loss"], metrics["train.loss_max"]) == (0.5, 1.0)
    assert metrics["train.skipped_steps"] == 2.0


def test_a_population_over_federations_reports_the_round_of_its_best_member() -> None:
    strategy = {
        "type": "PopulationBased",
        "population_size": 2,
        "generations": 1,
        "exploit": {"method": "Truncation", "fraction": 0.5},
        "explore": {"method": "Perturbation", "factor": 0.2},
        "options": {"inner": {**FEDERATED, "num_clients": 2, "rounds": 1}},
    }
    text = job_text(
        strategy,
        search_space={"optimizer.lr": {"low": 0.1, "high": 1.0}},
        steps_per_generation=1,
        evaluation={"metrics": [], "best": "loss", "mode": "min"},
    )
    simulation = start(text, "a")
    simulation.run()
    (closed,) = simulation.facts(GenerationClosed)
    assert isinstance(closed, GenerationClosed)
    assert closed.metrics["train.loss"] == 0.5


def test_the_reports_of_the_simulation_are_of_this_version() -> None:
    simulation = opened({**FEDERATED, "num_clients": 3}, "a")
    facts = [fact for effect in trained(simulation) for fact in do(effect)]
    assert all(isinstance(fact, UpdateReceived) and fact.num_steps for fact in facts)


def test_updates_over_no_rows_have_no_mean_loss() -> None:
    empty = [replaced.model_copy(update={"num_samples": 0}) for replaced in UPDATES]
    found = round_metrics(dict(enumerate(empty)), (), 0)
    assert not any(name.startswith("train.loss") for name in found)
    assert found["train.sent_bytes"] == 24.0


@pytest.mark.parametrize("metrics", [{}, {"train.skipped_steps": 2}], ids=["none", "skipped"])
def test_updates_of_an_earlier_version_count_one_after_the_other(
    metrics: dict[str, float],
) -> None:
    """It took the newest update for all, and wrote no number of steps."""
    state = opened(FEDERATED, "a").state
    old = UPDATES[0].model_copy(update={"num_steps": 0, "metrics": metrics})
    for client in (0, 1):
        state = apply(state, RUN, old.model_copy(update={"client": client}), 1.0)
    found = state.runs[RUN].metrics
    assert found["train.loss"] == 4.0
    assert found.get("train.skipped_steps", 0) == 2 * metrics.get("train.skipped_steps", 0)
