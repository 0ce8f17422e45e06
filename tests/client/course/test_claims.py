"""The claims that a client reads from the events of a run."""

from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.client.course.claims import ClaimPlace, RunClaims, first_difference
from stratagem.client.course.views import Event, Phase

Fact = tuple[str, Mapping[str, Any]]


def claims_of(*facts: Fact) -> RunClaims:
    return RunClaims.of(
        Event(index, 0.0, kind, kind, {"party": "", **payload}, Phase.RUNNING)
        for index, (kind, payload) in enumerate(facts)
    )


def formed(*workers: str, party: str = "", fingerprint: str = "n") -> Fact:
    members = [{"worker_id": each, "incarnation": "a"} for each in workers]
    return "MembersFormed", {"party": party, "members": members, "fingerprint": fingerprint}


def committed(segment: int, step: int, digest: str, party: str = "", **more: Any) -> Fact:
    of = {"party": party, "segment": segment, "step": step, "digest": digest}
    return "SegmentCommitted", {**of, **more}


def assigned(round_num: int, **workers: str | None) -> Fact:
    each = [
        {"client": int(name[1:]), "member": worker and {"worker_id": worker}}
        for name, worker in workers.items()
    ]
    return "ClientsAssigned", {"round_num": round_num, "assignments": each}


def received(round_num: int, client: int, digest: str) -> Fact:
    return "UpdateReceived", {"round_num": round_num, "client": client, "digest": digest}


def closed(round_num: int, *bases: str, by_policy: bool = False) -> Fact:
    accepted = [{"client": client, "base": base} for client, base in enumerate(bases)]
    return "RoundClosed", {"round_num": round_num, "accepted": accepted, "by_policy": by_policy}


BUILT: Fact = ("ModelBuilt", {"segment": 0, "step": 0, "digest": "m"})


def test_states_carry_their_workers_and_numerics() -> None:
    claims = claims_of(formed("a", "b"), BUILT, formed("c"), committed(1, 4, "s"))
    built, state = claims.by_place.values()
    assert (built.place, built.workers, built.digest) == (ClaimPlace("", 0), ("a", "b"), "m")
    assert (state.place, state.workers, state.numerics) == (ClaimPlace("", 4), ("c",), "n")
    assert claims.last_step == 4
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
    assert str(list(claims.by_place)[2]) == "client0 from step 1: state after 4 steps"


def test_what_is_done_again_replaces_what_was_done_before() -> None:
    claims = claims_of(committed(1, 2, "x"), committed(2, 4, "y"), committed(1, 2, "z"))
    assert [(p.step, c.digest) for p, c in claims.by_place.items()] == [(4, "y"), (2, "z")]


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (closed(2, "", by_policy=True), "timing decided about round or segment 2"),
        (closed(2, "", "older"), "round 2 took an update of an earlier round, that of client 1"),
    ],
)
def test_what_timing_has_decided_is_in_doubt_with_all_that_follows(fact: Fact, words: str) -> None:
    before, after = committed(1, 1, "x"), committed(2, 2, "y")
    claims = claims_of(before, closed(1, "", ""), fact, after, committed(1, 4, "z", "client0"))
    assert [claim.doubt for claim in claims.by_place.values()] == ["", words, words]


def test_a_doubt_about_one_member_is_none_about_another() -> None:
    doubted = committed(1, 4, "x", "member1", by_policy=True)
    claims = claims_of(doubted, committed(1, 4, "y", "member2"), committed(1, 4, "r"))
    assert [bool(claim.doubt) for claim in claims.by_place.values()] == [True, False, True]


def test_the_first_difference_is_that_of_the_first_common_place() -> None:
    run = claims_of(BUILT, committed(1, 2, "a"), committed(2, 4, "b"), committed(3, 6, "c"))
    other = claims_of(BUILT, committed(2, 4, "x"), committed(3, 6, "y"))
    found = first_difference(run, other)
    assert found is not None
    assert [claim.digest for claim in found] == ["b", "x"]
    assert first_difference(run, claims_of(BUILT)) is None
