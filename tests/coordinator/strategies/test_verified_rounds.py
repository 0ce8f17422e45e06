"""Rounds of federations and generations of populations that are verified while they train."""

from typing import Any

import pytest

from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.coordinator.core import facts as f
from tests.coordinator.core.jobs import (
    FEDERATED,
    INNER,
    POPULATION_SECTIONS,
    population,
    silos,
)
from tests.coordinator.strategies.computing import Computing, Disturb, nobody, run, verified

YOGI = {
    **FEDERATED,
    "aggregation": {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.001},
}
DRAWN = {**FEDERATED, "client_selection": {"method": "Random", "fraction": 0.5}}
CONTROLLED = {**FEDERATED, "options": {"control": "scaffold"}}
REGIONS = silos(2, inner={**FEDERATED, "num_clients": 3, "rounds": 2})
ROUNDS: dict[str, dict[str, Any]] = {
    "averages": FEDERATED,
    "a server optimizer": YOGI,
    "drawn clients": DRAWN,
    "client states": CONTROLLED,
    "silos": silos(2),
    "regions": REGIONS,
}
GENERATIONS: dict[str, dict[str, Any]] = {
    "members": population(),
    "few members": population(2, 2, exploit={"method": "Truncation", "fraction": 0.5}),
    "parties": population(3, inner=INNER),
    "federations": population(2, 3, inner={**FEDERATED, "rounds": 5}),
}
SECTIONS = {**POPULATION_SECTIONS, "checkpoint": None}
CASES = {
    **{name: (strategy, {"checkpoint": None}) for name, strategy in ROUNDS.items()},
    **{name: (strategy, SECTIONS) for name, strategy in GENERATIONS.items()},
}


def executed(name: str, disturb: Disturb = nobody, **more: Any) -> Computing:
    strategy, sections = CASES[name]
    if name == "federations":  # what is evaluated of them has this name
        sections = {**sections, "evaluation": {**sections["evaluation"], "best": "loss"}}
    sections = {**sections, "on": "members", **more}
    crashes = sections.pop("crashes", False)
    return run(verified(strategy, **sections), *"abcd", disturb=disturb, crashes=crashes)


@pytest.mark.parametrize("name", CASES)
def test_each_one_is_verified_and_changes_nothing(name: str) -> None:
    plain = executed(name, sample=0.0)
    simulation = executed(name)
    assert simulation.record.ended == plain.record.ended, simulation.record.reason
    assert simulation.course == plain.course
    last = simulation.course[-1][0]
    segments = [fact.segment for fact in simulation.facts(f.SegmentVerified)]
    assert segments == [*range(1, last + 1)]
    assert not simulation.facts(f.SegmentRefuted)
    assert simulation.record.is_reproducible
    # Its clients are those of the run: the selection may follow from what their workers have.
    assert VERIFIER not in {fact.party for fact in simulation.facts(f.RosterFormed)}


def wrong(worker: str, times: int | None = None) -> Disturb:
    """The worker computes wrongly, always or the first times."""
    left = [times]

    def disturb(workers: frozenset[str], _segment: int, number: int) -> str:
        if worker not in workers or left[0] == 0:
            return ""
        left[0] = left[0] and left[0] - 1
        return "wrong" if times else "wrong by nature"

    return disturb


def quarantined(simulation: Computing) -> set[str]:
    return {str(fact.worker_id) for fact in simulation.facts(f.WorkerQuarantined)}


CRASHING = ("averages", "client states", "few members")
"""In which the coordinator dies after each fact, and reads all of them again."""


@pytest.mark.parametrize(
    ("name", "crashes"),
    [*((name, False) for name in CASES), *((name, True) for name in CRASHING)],
)
def test_a_worker_that_computes_wrongly_is_found_and_changes_nothing(
    name: str, crashes: bool
) -> None:
    simulation = executed(name, wrong("b"), crashes=crashes)
    assert simulation.course == executed(name, sample=0.0).course
    assert quarantined(simulation) == {"b"}
    assert {fact.conclusion for fact in simulation.facts(f.SegmentRefuted)} <= {
        Conclusion.RUN,
        Conclusion.VERIFIER,
    }


@pytest.mark.parametrize("name", CASES)
def test_a_transient_fault_is_undone_and_leaves_marks(name: str) -> None:
    simulation = executed(name, wrong("b", times=1))
    assert simulation.course == executed(name, sample=0.0).course
    (refuted,) = simulation.facts(f.SegmentRefuted)
    assert "b" in refuted.marked
    assert quarantined(simulation) == set()
