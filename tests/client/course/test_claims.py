"""The claims that a client reads from the events of a run."""

import json

import pytest

from stratagem.client.course.claims import (
    NUM_ROWS,
    NUM_SAMPLES,
    OF_MACHINES,
    ROSTER,
    ROWS,
    RULES,
    ClaimPlace,
    doubt_of,
    first_difference,
)
from stratagem.coordinator.core.courses import needs_its_journal
from stratagem.coordinator.core.facts import (
    ROOT,
    ClientsJoined,
    ClientStateLost,
    Evaluated,
    Noted,
    RoundClosed,
    RoundWaits,
    UpdateRejected,
)
from stratagem.coordinator.core.facts import (
    Fact as CoordinatorFact,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from tests.client.run_facts import (
    BUILT,
    Fact,
    assigned,
    claims_of,
    closed,
    committed,
    formed,
    received,
)


def test_states_carry_their_workers_and_numerics() -> None:
    claims = claims_of(formed("a", "b"), BUILT, formed("c"), committed(1, 4, "s"))
    built, state = claims.by_place.values()
    assert (built.place, built.workers, built.digest) == (ClaimPlace("", 0), ("a", "b"), "m")
    assert (state.place, state.workers, state.numerics) == (ClaimPlace("", 4), ("c",), "n")
    assert (claims.last_step, claims_of().last_step) == (4, 0)
    assert str(state.place) == "state after 4 steps"
    assert str(ClaimPlace("", 1)) == "state after 1 step"


def test_updates_carry_the_worker_of_their_client() -> None:
    claims = claims_of(assigned(1, c0="a", c1=None), received(1, 0, "u"), received(1, 1, "v"))
    first, second = claims.by_place.values()
    assert (first.place, first.workers) == (ClaimPlace("", 1, 0), ("a",))
    assert second.workers == ()
    assert str(first.place) == "update of client 0 in round 1"


def test_the_steps_of_a_client_begin_with_each_round() -> None:
    claims = claims_of(
        committed(1, 4, "x", "client0"),
        committed(1, 1, "r"),
        committed(1, 4, "y", "client0"),
        committed(1, 4, "z", "client0/part"),
    )
    assert [place.after for place in claims.by_place] == [0, 0, 1, 4]
    first, _, third, _ = map(str, claims.by_place)
    assert first == "client0: state after 4 steps"
    assert third == "client0 from step 1: state after 4 steps"
    # What is no state, or is about an earlier one, begins no round.
    later = claims_of(
        committed(1, 1, "x"),
        committed(2, 2, "y"),
        ("Evaluated", {"segment": 1, "predictions": "p"}),
        received(3, 0, "u"),
        committed(1, 4, "z", "client1"),
    )
    assert [place.after for place in later.by_place if place.party] == [2]


def test_what_is_done_again_replaces_what_was_done_before() -> None:
    claims = claims_of(committed(1, 2, "x"), committed(2, 4, "y"), committed(1, 2, "z"))
    assert [(p.step, c.digest) for p, c in claims.by_place.items()] == [(4, "y"), (2, "z")]


def rejected(cause: str) -> Fact:
    return "UpdateRejected", {"round_num": 2, "client": 1, "cause": cause}


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (closed(2, "", by_policy=True), "timing decided about round or segment 2"),
        (closed(2, "", "older"), "round 2 took an update of an earlier round, that of client 1"),
        (rejected("crashed"), "a machine, not the job, left out client 1 in round 2"),
        (("RoundWaits", {"round_num": 2}), "round 2 waited for clients"),
        (("ClientsJoined", {"clients": []}), "clients joined while the run trained"),
        (("ClientStateLost", {"client": 1, "round_num": 2}), "client 1 lost what it had kept"),
        (("Evaluated", {"segment": 2, "without": [1]}), "segment 2 was evaluated without clients"),
        (("PartyFailed", {"party": "member1", "cause": "memory"}), "member1 failed by its machine"),
        (("MemberEvolved", {"member": 1}), "members evolved in the order in which they finished"),
        (
            ("KeysPosted", {"round_num": 2, "left_out": [{"client": 1, "cause": "absent"}]}),
            "a machine, not the job, left out client 1 in round 2",
        ),
        (
            ("RunResumed", {"from_segment": None, "by_policy": True}),
            "the run was resumed without all that its strategy had kept",
        ),
    ],
)
def test_what_timing_has_decided_is_in_doubt_with_all_that_follows(fact: Fact, words: str) -> None:
    before, after = committed(1, 1, "x"), committed(2, 2, "y")
    claims = claims_of(before, closed(1, "", ""), fact, after, committed(1, 4, "z", "client0"))
    first, *others = [claim.doubt for claim in claims.by_place.values()]
    assert not first
    assert all(each.startswith(words) for each in others)


@pytest.mark.parametrize(
    "fact",
    [
        rejected("exception"),
        rejected("unknown"),
        ("Evaluated", {"segment": 2, "without": []}),
        ("PartyFailed", {"party": "member1", "cause": "exception"}),
        ("RunResumed", {"from_segment": None, "by_policy": False}),
    ],
)
def test_what_the_job_has_decided_is_not_in_doubt(fact: Fact) -> None:
    (state,) = claims_of(fact, committed(2, 2, "y")).by_place.values()
    assert not state.doubt


def test_the_causes_of_machines_are_those_of_the_coordinator() -> None:
    assert {cause.value for cause in Cause if not cause.is_of_the_job} == OF_MACHINES


def of_client(cause: Cause) -> UpdateRejected:
    return UpdateRejected(party=ROOT, round_num=1, client=0, reason="why", cause=cause)


FACTS: list[CoordinatorFact] = [
    *map(of_client, Cause),
    RoundClosed(party=ROOT, round_num=1, accepted=(), reason="why", by_policy=True),
    RoundClosed(party=ROOT, round_num=1, accepted=(), reason="why", by_policy=False),
    Noted(party=ROOT, kind="x", data={}, by_policy=True),
    Noted(party=ROOT, kind="x", data={}),
    Evaluated(party=ROOT, segment=1, metrics={}, without=(1,)),
    Evaluated(party=ROOT, segment=1, metrics={}),
    RoundWaits(party=ROOT, round_num=1, reason="why"),
    ClientsJoined(party=ROOT, clients=()),
    ClientStateLost(party=ROOT, round_num=1, client=0, reason="why"),
]


@pytest.mark.parametrize("fact", FACTS, ids=str)
def test_a_client_doubts_what_makes_the_coordinator_call_a_run_not_reproducible(
    fact: CoordinatorFact,
) -> None:
    doubt = doubt_of(type(fact).__name__, json.loads(fact.model_dump_json()))
    assert bool(doubt) == needs_its_journal(fact)


def test_masked_updates_are_no_claims() -> None:
    keys: Fact = ("KeysPosted", {"round_num": 1, "left_out": []})
    claims = claims_of(keys, received(1, 0, "masked"), committed(1, 1, "sum"))
    assert [claim.digest for claim in claims.by_place.values()] == ["sum"]


def test_averages_predictions_and_the_states_of_generations_are_claims() -> None:
    evaluated = {"segment": 1, "without": [], "predictions": "p"}
    claims = claims_of(
        committed(1, 4, "x", average="a"),
        committed(2, 8, "y"),
        ("Evaluated", evaluated),
        ("GenerationClosed", {"generation": 3, "step": 12, "digest": "g", "by_policy": False}),
        ("Noted", {"segment": 4, "step": 16, "digest": "n", "by_policy": False}),
        ("Noted", {"segment": 0, "step": 0, "digest": "", "by_policy": False}),
    )
    assert {str(place): claim.digest for place, claim in claims.by_place.items()} == {
        "state after 4 steps": "x",
        "average after 4 steps": "a",
        "state after 8 steps": "y",
        "predictions after 4 steps": "p",
        "state after 12 steps": "g",
        "state after 16 steps": "n",
    }
    assert claims.last_step == 16
    assert claims.by_place[ClaimPlace("", 12)].segment == 3


def test_a_run_that_returns_to_a_commit_counts_the_steps_of_its_clients_from_there() -> None:
    resumed = {"from_segment": 1, "step": 1, "by_policy": False}
    claims = claims_of(
        committed(1, 4, "w", "client0"),
        committed(1, 1, "a"),
        committed(1, 4, "x", "client0"),
        committed(2, 2, "b"),
        ("RunResumed", resumed),
        committed(1, 4, "y", "client0"),
    )
    assert claims.by_place[ClaimPlace("client0", 4, None, 1)].digest == "y"
    assert claims.by_place[ClaimPlace("client0", 4)].digest == "w"


def test_what_a_run_has_undone_it_does_not_claim() -> None:
    resumed = {"from_segment": 1, "step": 1, "by_policy": False}
    states = [committed(number, number, f"s{number}") for number in range(4)]
    claims = claims_of(*states, ("RunResumed", resumed), committed(2, 2, "again"))
    assert [claim.digest for claim in claims.by_place.values()] == ["s0", "s1", "again"]
    assert claims.last_step == 2


def test_inputs_of_a_run_are_those_that_its_job_does_not_say() -> None:
    clients = [{"client": 0, "worker_id": "a", "tags": []}]
    claims = claims_of(
        ("RunSubmitted", {"numerics": 3}),
        ("RosterFormed", {"clients": clients}),
        ("ModelBuilt", {"step": 0, "digest": "m", "num_rows": {"train": 5}, "rows": "first"}),
    )
    assert claims.inputs == {
        (RULES, ""): 3,
        (ROSTER, ""): {0: "a"},
        (NUM_ROWS, ""): {"train": 5},
        (ROWS, ""): "first",
    }
    # Federations within one run have clients of the same numbers.
    kind, update = received(1, 0, "u")
    members = claims_of(*((kind, {**update, "party": f"member{k}"}) for k in range(2)))
    assert members.inputs == {(NUM_SAMPLES, f"member{k}: client 0 in round 1"): 5 for k in range(2)}


def test_the_first_difference_is_that_of_the_first_common_place() -> None:
    run = claims_of(BUILT, committed(1, 2, "a"), committed(2, 4, "b"), committed(3, 6, "c"))
    other = claims_of(BUILT, committed(2, 4, "x"), committed(3, 6, "y"))
    found = first_difference(run, other)
    assert found is not None
    assert [claim.digest for claim in found] == ["b", "x"]
    assert first_difference(run, claims_of(BUILT)) is None
