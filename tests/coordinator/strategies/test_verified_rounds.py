"""Rounds of federations and generations of populations that are verified while they train."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from stratagem.common.base.ids import Digest
from stratagem.common.job import JobSpec
from stratagem.common.numerics.verification import VERIFIER, Conclusion
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import effects as e
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.commands import CancelRun, ResumeRun, SubmitRun
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.strategy_calls import objections_to
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated import strategy as federated
from stratagem.coordinator.strategies.population.run import digest as population_digest
from stratagem.coordinator.strategies.verdict import MAX_EXECUTIONS
from tests.coordinator.core.jobs import FEDERATED, INNER, POPULATION_SECTIONS, population, silos
from tests.coordinator.core.simulation import RUN
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


@dataclass
class Troubled(Computing):
    """A simulation in which some effects end otherwise than by what is right."""

    answer: Callable[[e.Effect], f.Fact | None] = lambda _: None

    def _do(self, effect: e.Effect) -> f.Fact:
        return self.answer(effect) or super()._do(effect)


def troubled(text: str, answer: Callable[[e.Effect], f.Fact | None], *workers: str) -> Troubled:
    simulation = Troubled(answer=answer)
    simulation.come(workers)
    simulation.tell(SubmitRun(RUN, text, 0.0))
    while simulation.queue:
        simulation.step()
    return simulation


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


@pytest.mark.parametrize("inner", [None, {**FEDERATED, "rounds": 5}])
def test_a_member_that_cannot_be_built_fails_for_the_verifier_too(inner: Any) -> None:
    """What a population begins with is then not the state of each member."""

    def answer(effect: e.Effect) -> f.Fact | None:
        if not isinstance(effect, e.Build) or not effect.party.endswith("member1"):
            return None
        return f.PartyFailed(party=effect.party, reason="E: it has no such layer")

    evaluation = {**SECTIONS["evaluation"], "best": "loss"} if inner else SECTIONS["evaluation"]
    sections: dict[str, Any] = {**SECTIONS, "on": "members", "evaluation": evaluation}
    text = verified(population(3, 2, inner=inner), **sections)
    simulation = troubled(text, answer, *"abc")
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1, 2]
    assert not simulation.facts(f.SegmentRefuted)


def test_a_round_that_a_machine_has_influenced_is_not_verified() -> None:
    """What has left out a client need not happen again."""

    def answer(effect: e.Effect) -> f.Fact | None:
        if not isinstance(effect, e.TrainClient) or (effect.round_num, effect.client) != (2, 3):
            return None
        of: dict[str, Any] = {"party": effect.party, "round_num": 2, "client": 3}
        return f.UpdateRejected(**of, reason="no memory", cause=Cause.MEMORY)

    text = verified(FEDERATED, on="members", checkpoint=None)
    simulation = troubled(text, answer, *"abcd")
    assert [fact.segment for fact in simulation.facts(f.SegmentVerified)] == [1, 3]
    assert simulation.status.extra["verification"] == "2 of 3 chosen segments verified"


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_federation_that_fails_goes_on_twice_from_a_state_that_is_not_in_doubt(
    times: int,
) -> None:
    left = [4 * times]

    def answer(effect: e.Effect) -> f.Fact | None:
        if not isinstance(effect, e.TrainClient) or effect.party or effect.round_num != 2:
            return None
        left[0] -= 1
        of: dict[str, Any] = {"party": effect.party, "round_num": 2, "client": effect.client}
        rejected = f.UpdateRejected(**of, reason="a loss of NaN", cause=Cause.NOT_FINITE_LOSS)
        return rejected if left[0] >= 0 else None

    simulation = troubled(verified(FEDERATED, checkpoint=None, on="members"), answer, *"abcd")
    assert len(simulation.facts(f.RunResumed)) == min(times, 2)
    if times > 2:
        assert simulation.record.ended is RunPhase.FAILED
    else:
        assert simulation.course == executed("averages", sample=0.0).course


def test_clients_of_some_workers_are_verified_by_any_worker() -> None:
    selected = {"method": "ByCapability", "required_tags": ["gpu"]}
    simulation = Computing()
    simulation.come("ab", tags=("gpu",))
    simulation.come("c")
    strategy = {**FEDERATED, "client_selection": selected}
    simulation.tell(SubmitRun(RUN, verified(strategy, checkpoint=None), 0.0))
    simulation.complete()
    assert {fact.workers for fact in simulation.facts(f.SegmentVerified)} == {("c",)}
    assert len(simulation.facts(f.SegmentVerified)) == 3


def test_two_workers_of_the_run_confirm_it_together() -> None:
    """One alone might repeat a defect of its own, and nobody else is there."""

    def first_of_the_verifier(_names: frozenset[str], segment: int, number: int) -> str:
        return "!" * (segment == 1 and number == 4)

    simulation = executed("averages", first_of_the_verifier)
    refuted = simulation.fact(f.SegmentRefuted)
    assert (refuted.conclusion, refuted.marked) == (Conclusion.VERIFIER, ("a",))
    assert refuted.workers[1:4] == (("a",), ("b",), ("c",))
    assert not simulation.facts(f.RunResumed)


def test_a_job_that_gives_others_bits_each_time_is_known_after_a_few_executions() -> None:
    simulation = run(
        verified(), *"abcdefgh", disturb=lambda _n, segment, number: str(number) * (segment == 2)
    )
    refuted = simulation.fact(f.SegmentRefuted)
    assert refuted.conclusion is Conclusion.JOB
    assert len(refuted.digests) == 1 + MAX_EXECUTIONS


def test_a_strategy_that_cannot_train_a_segment_again_is_refused() -> None:
    mine = replace(BUILT_IN.built_in["Local"], repeating=None)
    strategies = replace(BUILT_IN, installed={"mine": mine})
    text = verified({"type": "Custom", "coordinator": "mine", "config": {}})
    (violation,) = objections_to(JobSpec.from_json(text), strategies)
    assert violation.field == "verification"
    assert "Custom" in violation.message


@pytest.mark.parametrize(("name", "kind"), [("members", f.GenerationClosed), ("averages", None)])
def test_a_user_has_a_federation_return_and_no_population(
    name: str, kind: type[f.Fact] | None
) -> None:
    strategy, sections = CASES[name]
    simulation = Computing()
    simulation.come("abcd")
    simulation.tell(SubmitRun(RUN, verified(strategy, **sections, on="members"), 0.0))
    simulation.until(kind or f.SegmentCommitted, 2)
    simulation.tell(CancelRun(RUN))
    simulation.run()
    if kind is not None:
        refused = simulation.refusal(ResumeRun(RUN, from_segment=1))
        assert "goes on from its last commit" in refused.reason
        return
    simulation.tell(ResumeRun(RUN, from_segment=1))
    simulation.complete()
    assert simulation.course == executed(name, sample=0.0).course
    assert simulation.facts(f.SegmentVerified)[-1].segment == 3


def test_all_states_from_which_a_round_begins_are_compared() -> None:
    rounds = executed("client states", sample=0.0).record.value
    assert rounds.committed is not None
    plain = replace(rounds, client_states=None)
    assert federated.digest(plain) == rounds.committed.digest
    states = replace(rounds.client_states, newest={})
    moments = replace(plain, server_state=(Digest("moments"),))
    others = replace(plain, server_state=(Digest("others"),))
    different = [rounds, plain, replace(rounds, client_states=states), moments, others]
    digests = [*map(federated.digest, different)]
    assert digests[1] == digests[2]  # nobody has a state yet
    assert len({*digests}) == 4


def test_all_members_of_a_generation_are_compared() -> None:
    value = executed("members", sample=0.0).record.value
    last = value.members[-1]
    base = nested.committed(last.child)
    assert base is not None
    state = replace(base, digest=Digest("another"))
    child = replace(last.child, value=replace(last.child.value, committed=state))
    different = [
        last,
        replace(last, child=child),
        replace(last, scores=(*last.scores[:-1], None)),
        replace(last, params={"optimizer.lr": 0.5}),
    ]
    populations = (replace(value, members=(*value.members[:-1], each)) for each in different)
    assert len({*map(population_digest, populations)}) == 4
