"""Rounds whose updates count otherwise than by rows, by a robust rule, losses or steps: what is
asked for before the fold, how many updates a rule needs, and which jobs cannot have them."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import MultiKrum, TrimmedMean, fewest_updates, is_judged
from stratagem.coordinator.core.effects import AggregateRound, JudgeUpdates
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts import ROOT, RoundClosed, RoundWaits, UpdatesJudged
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.pending import pending
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import FEDERATED, INNER, job_text, silos
from tests.coordinator.core.simulation import Simulation, do, opened, rejected, start, trained

pytestmark = pytest.mark.core


KRUM = {"robust": {"name": "krum", "byzantine": 1}}
FAIR, NOVA = {"q": 0.2}, {"normalize": "fednova"}
RANDOM = {"client_selection": {"method": "Random", "fraction": 0.5}}
LATE = {"over_select": 1, "late_updates": {"discount": 0.5}}
SGD = {"name": "sgd", "lr": 0.1}
PROX = {"aggregation": {"method": "FedProx", "mu": 2.0}}
YOGI = {"aggregation": {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.001}}
PRIVACY = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}


def federation(options: dict[str, Any], num_clients: int = 6, **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "num_clients": num_clients, "options": options, **changes}


def answer(simulation: Simulation, *clients: int) -> None:
    while due := [effect for effect in trained(simulation) if effect.client in clients]:
        simulation.report(do(due[0]))


def fails(simulation: Simulation, *clients: int) -> None:
    simulation.report(*(rejected(client, "KeyError: 1") for client in clients))


def verdict(*weights: float, round_num: int = 1) -> UpdatesJudged:
    of: dict[str, Any] = {"weights": weights, "scores": weights, "reason": "client 2 it is"}
    return UpdatesJudged(party=ROOT, round_num=round_num, **of)


def test_a_verdict_is_a_fact_before_the_fold_which_takes_it() -> None:
    simulation = opened(federation(KRUM), "a", "b")
    simulation.refusal(verdict(1.0))
    answer(simulation, *range(6))
    judging = simulation.due_one(JudgeUpdates)
    assert [accepted.client for accepted in judging.accepted] == list(range(6))
    assert not simulation.due(AggregateRound)
    simulation.refusal(verdict(1.0, round_num=2))
    weights = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    simulation.report(verdict(*weights))
    assert sentence(simulation.fact(UpdatesJudged)) == "client 2 it is"
    simulation.crash()
    assert simulation.due_one(AggregateRound).weights == weights
    assert not simulation.due(JudgeUpdates)
    assert "does not wait for a verdict" in str(simulation.refusal(verdict(*weights[::-1])))


def test_each_round_has_a_verdict_of_its_own_also_of_silos() -> None:
    options = {"inner": INNER, "robust": {"name": "krum", "byzantine": 0}}
    for strategy, rounds in ((federation(KRUM), 3), (silos(3, 2, options=options), 2)):
        simulation = start(job_text(strategy), "a", "b")
        simulation.complete()
        judged = [(f.party, f.round_num, len(f.weights)) for f in simulation.facts(UpdatesJudged)]
        size = strategy["num_clients"]
        assert judged == [(ROOT, number, size) for number in range(1, rounds + 1)]


def test_statistics_of_elements_need_no_verdict() -> None:
    simulation = opened(federation({"robust": {"name": "median"}}), "a")
    answer(simulation, *range(6))
    assert simulation.due(AggregateRound)
    assert not simulation.due(JudgeUpdates)


def test_failures_may_leave_as_many_as_the_rule_needs_or_the_round_waits_if_it_may() -> None:
    simulation = opened(federation(KRUM), "a")
    answer(simulation, 0, 1, 2, 3)
    fewer = simulation.fork()
    answer(simulation, 4)
    fails(simulation, 5)
    assert len(simulation.fact(RoundClosed).accepted) == 5
    fails(fewer, 4, 5)
    assert fewer.record.reason == (
        "round 1: 4 of 6 updates; 2 raised KeyError: 1 (clients 4, 5); "
        "5 are needed for options.robust"
    )
    share = opened(federation({**KRUM, "quorum": 0.5}), "a")
    answer(share, 0, 1, 2)
    fails(share, 3, 4, 5)
    assert "3 of 6 updates" in share.record.reason
    assert "5 are needed for options.robust" in share.record.reason, "a share does not lower it"
    simulation = opened(federation({**KRUM, "on_missing_quorum": "wait"}), "a")
    answer(simulation, 0, 1, 2, 3)
    fails(simulation, 4, 5)
    assert "5 are needed for options.robust" in simulation.fact(RoundWaits).reason
    assert simulation.phase is RunPhase.RECOVERING


def test_trimming_rounds_down_what_people_write() -> None:
    assert TrimmedMean(0.2).num_trimmed(5) == 1
    assert TrimmedMean(0.29).num_trimmed(100) == 29  # 0.29 * 100 is 28.999999999999996
    assert TrimmedMean(0.49).num_trimmed(3) == 1
    assert fewest_updates(TrimmedMean(0.2)) == 5
    assert fewest_updates(TrimmedMean(0.4)) == 3
    assert fewest_updates(MultiKrum(1)) == 5
    assert fewest_updates(None) == 1
    assert not is_judged(None)


def told(simulation: Simulation, name: str, values: dict[int, float]) -> None:
    """Clients answer in the order of the values, which they tell."""
    due = {effect.client: effect for effect in trained(simulation)}
    for client, value in values.items():
        simulation.report(do(due[client]).model_copy(update={name: value}))


def test_losses_and_steps_come_in_client_order_whoever_came_first() -> None:
    simulation = opened(federation(FAIR, 3), "a", "b")
    told(simulation, "loss_before", {2: 0.5, 0: 2.5, 1: 1.5})
    judging = simulation.due_one(JudgeUpdates)
    assert judging.losses == (2.5, 1.5, 0.5)
    simulation.crash()
    assert judging in pending(simulation.state)
    simulation.report(verdict(0.5, 0.3, 0.1))
    assert simulation.due_one(AggregateRound).weights == (0.5, 0.3, 0.1)
    simulation = opened(federation(FAIR, 3), "a")
    told(simulation, "loss_before", {0: 2.5, 2: 0.5})
    simulation.report(rejected(1, "its mean loss before is nan", Cause.NOT_FINITE_LOSS))
    judging = simulation.due_one(JudgeUpdates)
    assert judging.losses == (2.5, 0.5)
    assert [accepted.client for accepted in judging.accepted] == [0, 2]
    simulation = opened(federation(NOVA, 3), "a", "b")
    told(simulation, "num_applied_steps", {2: 5, 0: 3, 1: 9})
    fold = simulation.due_one(AggregateRound)
    assert fold.num_steps == (3, 9, 5)
    simulation.crash()
    assert fold in pending(simulation.state)


# ---- jobs that cannot have them ----


def objections(strategy: dict[str, Any], **sections: Any) -> list[str]:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.from_json(job_text(strategy, **sections))
    return [str(each).removeprefix("strategy.options.") for each in caught.value.violations]


def robust(name: str, **more: Any) -> dict[str, Any]:
    return {"robust": {"name": name, **more}}


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        (KRUM, RANDOM, "robust: needs the updates of at least 5 clients"),
        (robust("bulyan", byzantine=1), {}, "robust: needs the updates of at least 7 clients, and"),
        (robust("median"), {"num_clients": 2}, "robust: needs the updates of at least 3 clients"),
        (robust("trimmed_mean", trim=0.1), {}, "robust: needs the updates of at least 10 clients"),
        (robust("multi_krum", byzantine=1, keep=6), {}, "robust: needs the updates of at least 7"),
        (robust("median"), {"num_clients": 1025}, "robust: combines at most 1024 updates, and a"),
        ({**KRUM, "quorum": 4}, {}, "quorum: 4 is too few: options.robust needs the updates of at"),
        ({**KRUM, **LATE}, {**RANDOM, "num_clients": 12}, "late_updates: robust compares updates"),
        (robust("trimmed_mean", trim=0.5), {}, "robust.trim: 0.5 is not allowed"),
        (robust("norm_bound", norm=0), {}, "robust.norm"),
        (robust("best"), {}, "robust"),
        (robust("krum"), {}, "robust.byzantine"),
        (robust("median", trim=0.1), {}, "robust.trim"),
        (FAIR, PROX, "q: is of FedAvg only; the aggregation is FedProx"),
        (FAIR, YOGI, "q: is of FedAvg only; the aggregation is FedYogi"),
        ({**FAIR, "server_optimizer": {"name": "fedadam"}}, {}, "server_optimizer: is not possibl"),
        ({**FAIR, **robust("median")}, {}, "robust: is not possible with q"),
        ({**FAIR, **LATE}, {**RANDOM, "num_clients": 12}, "late_updates: is not possible with q"),
        ({**FAIR, "inner": INNER}, {}, "inner: is not possible with q: a silo does not measure"),
        ({**FAIR, **NOVA}, {}, "normalize: is not possible with q"),
        ({**NOVA, **robust("median")}, {}, "robust: is not possible with normalize"),
        ({**NOVA, **LATE}, {**RANDOM, "num_clients": 12}, "late_updates: is not possible with nor"),
        ({**NOVA, "inner": INNER}, {}, "inner: is not possible with normalize"),
        ({"normalize": "fedavg"}, {}, "normalize"),
        ({"q": -0.1}, {}, "q: -0.1 is not allowed"),
        ({"q": "fair"}, {}, "q"),
    ],
)
def test_a_strategy_that_it_does_not_go_with_is_refused(
    options: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    found = objections(federation(options, **changes))
    assert any(each.startswith(expected) for each in found), found


def test_a_rule_for_rounds_of_unknown_size_needs_enough_clients_in_all() -> None:
    tagged = {"method": "ByCapability", "required_tags": ["a"]}
    JobSpec.from_json(job_text(federation(KRUM, client_selection=tagged)))


def grouped(**group: Any) -> dict[str, Any]:
    return {**SGD, "groups": [{"name": "b", "max_dims": 1, **group}]}


COSINE = {**SGD, "schedule": {"name": "cosine"}}
STREAM = {"entrypoint": "tests.userland.data:load", "streams": 4}
OWN_OPTIMIZER = {"entrypoint": "tests.userland.optimizers:make", "lr": 0.1}
OWN_SCHEDULE = {**SGD, "schedule": {"entrypoint": "tests.userland.schedules:make"}}


@pytest.mark.parametrize(
    ("options", "changes", "sections", "expected"),
    [
        (FAIR, {}, {"optimizer": {**SGD, "name": "adam"}}, "optimizer.name: adam is not possible"),
        (FAIR, {}, {"optimizer": OWN_OPTIMIZER}, "optimizer.name: tests.userland.optimizers:make"),
        (FAIR, {}, {"optimizer": COSINE}, "optimizer.schedule: is not possible with strategy.op"),
        (FAIR, {}, {"optimizer": grouped(lr=0.2)}, "optimizer.groups[0].lr: is not possible with"),
        (FAIR, {}, {"optimizer": grouped(optimizer=SGD)}, "optimizer.groups[0].optimizer: is not"),
        (FAIR, {}, {"privacy": PRIVACY}, "q: is not possible with privacy"),
        (FAIR, {}, {"data": STREAM}, "q: is not possible with a stream of rows"),
        (NOVA, {}, {"privacy": PRIVACY}, "normalize: is not"),
        (NOVA, {}, {"optimizer": {**SGD, "name": "adam"}}, "optimizer.name: adam is not possible"),
        (
            NOVA,
            {},
            {"optimizer": {**SGD, "momentum": 0.9, "nesterov": True}},
            "optimizer.nesterov: is not",
        ),
        (NOVA, {}, {"optimizer": {**SGD, "dampening": 0.1}}, "optimizer.dampening: is not possibl"),
        (NOVA, {}, {"optimizer": grouped(momentum=0.5)}, "optimizer.groups[0].momentum: is not"),
        (NOVA, {}, {"optimizer": grouped(optimizer=SGD)}, "optimizer.groups[0].optimizer: is not"),
        (NOVA, {}, {"optimizer": OWN_SCHEDULE}, "optimizer.schedule.entrypoint: is not possible"),
        (NOVA, PROX, {"optimizer": {**SGD, "momentum": 0.9}}, "optimizer.momentum: is not possibl"),
        (NOVA, PROX, {"optimizer": COSINE}, "optimizer.schedule: is not possible with FedProx"),
        (NOVA, PROX, {"optimizer": grouped(lr=0.2)}, "optimizer.groups[0].lr: is not possible wit"),
        (NOVA, PROX, {"optimizer": {"name": "sgd", "lr": 0.5}}, "strategy.aggregation.mu: 2 is to"),
    ],
)
def test_a_job_that_it_does_not_go_with_is_refused(
    options: dict[str, Any], changes: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    found = objections(federation(options, 3, **changes), **sections)
    assert any(each.startswith(expected) for each in found), found


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [({**COSINE, "momentum": 0.9}, {}), (grouped(lr=0.2), {}), (SGD, PROX)],
)
def test_optimizers_whose_steps_go_known_ways_are_taken(
    optimizer: dict[str, Any], changes: dict[str, Any]
) -> None:
    JobSpec.from_json(job_text(federation(NOVA, 3, **changes), optimizer=optimizer))


def test_q_is_absent_from_the_text_of_jobs_without_it() -> None:
    assert '"q"' not in JobSpec.from_json(job_text(federation({}))).canonical_json()
    fair = JobSpec.from_json(job_text(federation(FAIR), optimizer={**SGD, "momentum": 0.9}))
    assert '"q":0.2' in fair.canonical_json()
