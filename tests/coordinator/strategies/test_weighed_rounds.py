"""Rounds whose updates count otherwise than by rows: what is asked for before the fold, and which
jobs cannot have them."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.commands import Refusal, Report
from stratagem.coordinator.core.effects import AggregateRound, JudgeUpdates
from stratagem.coordinator.core.facts import (
    ROOT,
    UpdateReceived,
    UpdateRejected,
    UpdatesJudged,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import FEDERATED, INNER, job_text
from tests.coordinator.core.simulation import RUN, Simulation, do
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core

FAIR = {"q": 0.2}
NOVA = {"normalize": "fednova"}
RANDOM = {"client_selection": {"method": "Random", "fraction": 0.5}}


def federation(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "num_clients": 3, "options": options, **changes}


def tell(simulation: Simulation, *facts: UpdateReceived | UpdateRejected | UpdatesJudged) -> None:
    for fact in facts:
        assert not isinstance(simulation.tell(Report(RUN, fact)), Refusal)


def answer(simulation: Simulation, losses: dict[int, float]) -> None:
    """Clients answer in the order of their losses here."""
    while due := {e.client: e for e in trained(simulation) if e.client in losses}:
        client = next(each for each in losses if each in due)
        (update,) = do(due[client])
        assert isinstance(update, UpdateReceived)
        tell(simulation, update.model_copy(update={"loss_before": losses[client]}))


def test_losses_are_asked_for_in_client_order_whoever_came_first() -> None:
    simulation = opened(federation(FAIR), "a", "b")
    answer(simulation, {2: 0.5, 0: 2.5, 1: 1.5})
    (judging,) = [e for e in pending(simulation.state) if isinstance(e, JudgeUpdates)]
    assert judging.losses == (2.5, 1.5, 0.5)
    before = simulation.state
    simulation.crash()
    assert simulation.state.runs == before.runs
    assert judging in pending(simulation.state)
    verdict = UpdatesJudged(
        party=ROOT, round_num=1, weights=(0.5, 0.3, 0.1), scores=(1.0, 1.0, 1.0)
    )
    tell(simulation, verdict)
    (fold,) = [e for e in pending(simulation.state) if isinstance(e, AggregateRound)]
    assert fold.weights == (0.5, 0.3, 0.1)


def test_a_client_without_a_loss_has_no_part_in_them() -> None:
    simulation = opened(federation(FAIR), "a")
    answer(simulation, {0: 2.5, 2: 0.5})
    reason = "its mean loss before training is nan"
    tell(
        simulation,
        UpdateRejected(
            party=ROOT, round_num=1, client=1, reason=reason, cause=Cause.NOT_FINITE_LOSS
        ),
    )
    (judging,) = [e for e in pending(simulation.state) if isinstance(e, JudgeUpdates)]
    assert judging.losses == (2.5, 0.5)
    assert [accepted.client for accepted in judging.accepted] == [0, 2]


def refused(strategy: dict[str, Any], **sections: Any) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.from_json(job_text(strategy, **sections))
    return [str(each) for each in caught.value.violations]


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        (
            FAIR,
            {"aggregation": {"method": "FedProx", "mu": 0.1}},
            "strategy.options.q: is of FedAvg only; the aggregation is FedProx",
        ),
        (
            FAIR,
            {"aggregation": {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.001}},
            "strategy.options.q: is of FedAvg only; the aggregation is FedYogi",
        ),
        (
            {**FAIR, "server_optimizer": {"name": "fedadam"}},
            {},
            "strategy.options.server_optimizer: is not possible with q",
        ),
        (
            {**FAIR, "robust": {"name": "median"}},
            {},
            "strategy.options.robust: is not possible with q",
        ),
        (
            {**FAIR, "over_select": 1, "late_updates": {"discount": 0.5}},
            {**RANDOM, "num_clients": 12},
            "strategy.options.late_updates: is not possible with q",
        ),
        (
            {**FAIR, "inner": INNER},
            {},
            "strategy.options.inner: is not possible with q: a silo does not measure",
        ),
        ({**FAIR, **NOVA}, {}, "strategy.options.normalize: is not possible with q"),
        (
            {**NOVA, "robust": {"name": "median"}},
            {},
            "strategy.options.robust: is not possible with normalize",
        ),
        (
            {**NOVA, "over_select": 1, "late_updates": {"discount": 0.5}},
            {**RANDOM, "num_clients": 12},
            "strategy.options.late_updates: is not possible with normalize",
        ),
        (
            {**NOVA, "inner": INNER},
            {},
            "strategy.options.inner: is not possible with normalize",
        ),
        ({"normalize": "fedavg"}, {}, "strategy.options.normalize"),
        ({"q": -0.1}, {}, "strategy.options.q: -0.1 is not allowed"),
        ({"q": "fair"}, {}, "strategy.options.q"),
    ],
)
def test_a_strategy_that_it_does_not_go_with_is_refused(
    options: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    found = refused(federation(options, **changes))
    assert any(each.startswith(expected) for each in found), found


SGD = {"name": "sgd", "lr": 0.1}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"optimizer": {"name": "adam", "lr": 0.1}},
            "optimizer.name: adam is not possible with strategy.options.q",
        ),
        (
            {"optimizer": {"entrypoint": "tests.userland.optimizers:make", "lr": 0.1}},
            "optimizer.name: tests.userland.optimizers:make is not possible",
        ),
        (
            {"optimizer": {**SGD, "schedule": {"name": "cosine"}}},
            "optimizer.schedule: is not possible with strategy.options.q",
        ),
        (
            {"optimizer": {**SGD, "groups": [{"name": "b", "match": ["*.bias"], "lr": 0.2}]}},
            "optimizer.groups[0].lr: is not possible with strategy.options.q",
        ),
        (
            {"optimizer": {**SGD, "groups": [{"name": "b", "max_dims": 1, "optimizer": SGD}]}},
            "optimizer.groups[0].optimizer: is not possible with strategy.options.q",
        ),
        (
            {
                "privacy": {
                    "clip": {"norm": 1.0},
                    "noise_multiplier": 1.0,
                    "target": {"delta": 1e-5},
                }
            },
            "strategy.options.q: is not possible with privacy",
        ),
        (
            {"data": {"entrypoint": "tests.userland.data:load", "streams": 4}},
            "strategy.options.q: is not possible with a stream of rows",
        ),
    ],
)
def test_a_job_that_q_does_not_go_with_is_refused(sections: dict[str, Any], expected: str) -> None:
    found = refused(federation(FAIR), **sections)
    assert any(each.startswith(expected) for each in found), found


PROX = {"aggregation": {"method": "FedProx", "mu": 2.0}}


@pytest.mark.parametrize(
    ("optimizer", "changes", "expected"),
    [
        ({"name": "adam", "lr": 0.1}, {}, "optimizer.name: adam is not possible with"),
        (
            {**SGD, "momentum": 0.9, "nesterov": True},
            {},
            "optimizer.nesterov: is not possible with strategy.options.normalize",
        ),
        ({**SGD, "dampening": 0.1}, {}, "optimizer.dampening: is not possible with"),
        (
            {**SGD, "groups": [{"name": "b", "max_dims": 1, "momentum": 0.5}]},
            {},
            "optimizer.groups[0].momentum: is not possible with strategy.options.normalize",
        ),
        (
            {**SGD, "groups": [{"name": "b", "max_dims": 1, "optimizer": SGD}]},
            {},
            "optimizer.groups[0].optimizer: is not possible with strategy.options.normalize",
        ),
        (
            {**SGD, "schedule": {"entrypoint": "tests.userland.schedules:make"}},
            {},
            "optimizer.schedule.entrypoint: is not possible with strategy.options.normalize",
        ),
        ({**SGD, "momentum": 0.9}, PROX, "optimizer.momentum: is not possible with FedProx"),
        (
            {**SGD, "schedule": {"name": "cosine"}},
            PROX,
            "optimizer.schedule: is not possible with FedProx",
        ),
        (
            {**SGD, "groups": [{"name": "b", "max_dims": 1, "lr": 0.2}]},
            PROX,
            "optimizer.groups[0].lr: is not possible with FedProx",
        ),
        (
            {"name": "sgd", "lr": 0.5},
            PROX,
            "strategy.aggregation.mu: 2 is too much with strategy.options.normalize: lr · mu must "
            "be below 1, is 1",
        ),
    ],
)
def test_an_optimizer_whose_steps_go_unknown_ways_is_refused(
    optimizer: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    found = refused(federation(NOVA, **changes), optimizer=optimizer)
    assert any(each.startswith(expected) for each in found), found


def test_privacy_bounds_a_change_that_is_not_divided() -> None:
    clip = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
    found = refused(federation(NOVA), privacy=clip)
    assert any(each.startswith("strategy.options.normalize: is not") for each in found), found


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        ({**SGD, "momentum": 0.9, "schedule": {"name": "cosine"}}, {}),
        ({**SGD, "groups": [{"name": "b", "max_dims": 1, "lr": 0.2}]}, {}),
        (SGD, PROX),
    ],
)
def test_optimizers_whose_steps_go_known_ways_are_taken(
    optimizer: dict[str, Any], changes: dict[str, Any]
) -> None:
    JobSpec.from_json(job_text(federation(NOVA, **changes), optimizer=optimizer))


def test_steps_come_to_the_fold_in_client_order_whoever_came_first() -> None:
    simulation = opened(federation(NOVA), "a", "b")
    num_steps = {2: 5, 0: 3, 1: 9}
    for client, number in num_steps.items():
        (effect,) = [e for e in trained(simulation) if e.client == client]
        (update,) = do(effect)
        assert isinstance(update, UpdateReceived)
        tell(simulation, update.model_copy(update={"num_applied_steps": number}))
    (fold,) = [e for e in pending(simulation.state) if isinstance(e, AggregateRound)]
    assert fold.num_steps == (3, 9, 5)
    before = simulation.state
    simulation.crash()
    assert simulation.state.runs == before.runs
    assert fold in pending(simulation.state)


def test_q_is_absent_from_the_text_of_jobs_without_it() -> None:
    plain = JobSpec.from_json(job_text(federation({}))).canonical_json()
    assert '"q"' not in plain
    fair = JobSpec.from_json(job_text(federation(FAIR), optimizer={**SGD, "momentum": 0.9}))
    assert '"q":0.2' in fair.canonical_json()
