"""Rounds under a robust rule: a verdict before the fold, and enough updates for the rule."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import MultiKrum, TrimmedMean, fewest_updates, is_judged
from stratagem.coordinator.core.commands import Refusal, Report
from stratagem.coordinator.core.effects import AggregateRound, JudgeUpdates
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import (
    ROOT,
    RoundClosed,
    RoundWaits,
    SegmentCommitted,
    UpdateReceived,
    UpdateRejected,
    UpdatesJudged,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.core.state_machine.pending_effects import pending
from tests.coordinator.core.jobs import FEDERATED, INNER, job_text, silos
from tests.coordinator.core.simulation import RUN, Simulation, do, phase, start
from tests.coordinator.strategies.open_round import opened, trained

pytestmark = pytest.mark.core

KRUM = {"robust": {"name": "krum", "byzantine": 1}}


def federation(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**FEDERATED, "num_clients": 6, "options": options, **changes}


def tell(simulation: Simulation, *facts: UpdateReceived | UpdateRejected) -> None:
    for fact in facts:
        assert not isinstance(simulation.tell(Report(RUN, fact)), Refusal)


def answer(simulation: Simulation, *clients: int) -> None:
    while due := [effect for effect in trained(simulation) if effect.client in clients]:
        tell(simulation, *do(due[0]))  # type: ignore[arg-type]


def fails(simulation: Simulation, *clients: int) -> None:
    for client in clients:
        fact = UpdateRejected(
            party=ROOT, round_num=1, client=client, reason="KeyError: 1", cause=Cause.EXCEPTION
        )
        tell(simulation, fact)


def verdict(*weights: float, round_num: int = 1) -> UpdatesJudged:
    return UpdatesJudged(
        party=ROOT, round_num=round_num, weights=weights, scores=weights, reason="client 2 it is"
    )


def due(simulation: Simulation) -> set[type]:
    return {type(effect) for effect in pending(simulation.state)}


def test_a_verdict_is_a_fact_before_the_fold_which_takes_it() -> None:
    simulation = opened(federation(KRUM), "a", "b")
    answer(simulation, *range(6))
    (judging,) = [e for e in pending(simulation.state) if isinstance(e, JudgeUpdates)]
    assert [accepted.client for accepted in judging.accepted] == list(range(6))
    assert AggregateRound not in due(simulation)
    weights = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    fact = verdict(*weights)
    assert not isinstance(simulation.tell(Report(RUN, fact)), Refusal)
    assert sentence(fact) == "client 2 it is"
    before = simulation.state
    simulation.crash()
    assert simulation.state.runs == before.runs
    (fold,) = [e for e in pending(simulation.state) if isinstance(e, AggregateRound)]
    assert fold.weights == weights
    assert JudgeUpdates not in due(simulation)
    again = simulation.tell(Report(RUN, verdict(*weights[::-1])))
    assert isinstance(again, Refusal)
    assert "does not wait for a verdict" in str(again)


def test_a_verdict_of_another_round_is_stale() -> None:
    simulation = opened(federation(KRUM), "a")
    assert isinstance(simulation.tell(Report(RUN, verdict(1.0))), Refusal)
    answer(simulation, *range(6))
    assert isinstance(simulation.tell(Report(RUN, verdict(1.0, round_num=2))), Refusal)


def test_each_round_has_a_verdict_of_its_own() -> None:
    simulation = start(job_text(federation(KRUM, rounds=3)), "a")
    simulation.run()
    assert [fact.round_num for fact in simulation.facts(UpdatesJudged)] == [1, 2, 3]
    assert len(simulation.facts(SegmentCommitted)) == 3


def test_statistics_of_elements_need_no_verdict() -> None:
    simulation = opened(federation({"robust": {"name": "median"}}), "a")
    answer(simulation, *range(6))
    assert AggregateRound in due(simulation)
    assert JudgeUpdates not in due(simulation)


def test_failures_may_leave_as_many_as_the_rule_needs() -> None:
    simulation = opened(federation(KRUM), "a")
    answer(simulation, 0, 1, 2, 3, 4)
    fails(simulation, 5)
    (closed,) = simulation.facts(RoundClosed)
    assert len(closed.accepted) == 5


def test_a_round_with_too_few_updates_for_the_rule_fails() -> None:
    simulation = opened(federation(KRUM), "a")
    answer(simulation, 0, 1, 2, 3)
    fails(simulation, 4, 5)
    assert simulation.state.runs[RUN].reason == (
        "round 1: 4 of 6 updates; 2 raised KeyError: 1 (clients 4, 5); "
        "5 are needed for options.robust"
    )


def test_a_round_with_too_few_updates_for_the_rule_waits_if_it_may() -> None:
    simulation = opened(federation({**KRUM, "on_missing_quorum": "wait"}), "a")
    answer(simulation, 0, 1, 2, 3)
    fails(simulation, 4, 5)
    (waits,) = simulation.facts(RoundWaits)
    assert "5 are needed for options.robust" in waits.reason
    assert phase(simulation) is RunPhase.RECOVERING


def test_a_share_as_quorum_does_not_lower_what_the_rule_needs() -> None:
    simulation = opened(federation({**KRUM, "quorum": 0.5}), "a")
    answer(simulation, 0, 1, 2)
    fails(simulation, 3, 4, 5)
    assert "3 of 6 updates" in simulation.state.runs[RUN].reason
    assert "5 are needed for options.robust" in simulation.state.runs[RUN].reason


RANDOM = {"client_selection": {"method": "Random", "fraction": 0.5}}


@pytest.mark.parametrize(
    ("options", "changes", "expected"),
    [
        (KRUM, RANDOM, "strategy.options.robust: needs the updates of at least 5 clients"),
        (
            {"robust": {"name": "bulyan", "byzantine": 1}},
            {},
            "strategy.options.robust: needs the updates of at least 7 clients, and a round has 6",
        ),
        (
            {"robust": {"name": "median"}},
            {"num_clients": 2},
            "strategy.options.robust: needs the updates of at least 3 clients, and a round has 2",
        ),
        (
            {"robust": {"name": "trimmed_mean", "trim": 0.1}},
            {},
            "strategy.options.robust: needs the updates of at least 10 clients",
        ),
        (
            {"robust": {"name": "multi_krum", "byzantine": 1, "keep": 6}},
            {},
            "strategy.options.robust: needs the updates of at least 7 clients",
        ),
        (
            {"robust": {"name": "median"}},
            {"num_clients": 1025},
            "strategy.options.robust: combines at most 1024 updates, and a round has 1025",
        ),
        (
            {**KRUM, "quorum": 4},
            {},
            "strategy.options.quorum: 4 is too few: options.robust needs the updates of at least 5",
        ),
        (
            {**KRUM, "over_select": 1, "late_updates": {"discount": 0.5}},
            {**RANDOM, "num_clients": 12},
            "strategy.options.late_updates: robust compares updates that began from one state",
        ),
        (
            {"robust": {"name": "trimmed_mean", "trim": 0.5}},
            {},
            "strategy.options.robust.trim: 0.5 is not allowed",
        ),
        ({"robust": {"name": "norm_bound", "norm": 0}}, {}, "strategy.options.robust.norm"),
        ({"robust": {"name": "best"}}, {}, "strategy.options.robust"),
        ({"robust": {"name": "krum"}}, {}, "strategy.options.robust.byzantine"),
        (
            {"robust": {"name": "median", "trim": 0.1}},
            {},
            "strategy.options.robust.trim",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        JobSpec.from_json(job_text(federation(options, **changes)))
    assert any(str(each).startswith(expected) for each in refused.value.violations)


def test_a_rule_for_rounds_of_unknown_size_needs_enough_clients_in_all() -> None:
    tagged = {"method": "ByCapability", "required_tags": ["a"]}
    JobSpec.from_json(job_text(federation(KRUM, client_selection=tagged)))


def test_trimming_rounds_down_what_people_write() -> None:
    assert TrimmedMean(0.2).num_trimmed(5) == 1
    assert TrimmedMean(0.29).num_trimmed(100) == 29  # 0.29 * 100 is 28.999999999999996
    assert TrimmedMean(0.49).num_trimmed(3) == 1
    assert fewest_updates(TrimmedMean(0.2)) == 5
    assert fewest_updates(TrimmedMean(0.4)) == 3
    assert fewest_updates(MultiKrum(1)) == 5
    assert fewest_updates(None) == 1
    assert not is_judged(None)


def test_silos_are_judged_as_any_clients() -> None:
    options = {"inner": INNER, "robust": {"name": "krum", "byzantine": 0}}
    simulation = start(job_text(silos(num_clients=3, rounds=2, options=options)), *"ab")
    simulation.run()
    assert phase(simulation) is RunPhase.COMPLETED
    judged = simulation.facts(UpdatesJudged)
    assert [(fact.party, fact.round_num, len(fact.weights)) for fact in judged] == [
        (ROOT, 1, 3),
        (ROOT, 2, 3),
    ]
