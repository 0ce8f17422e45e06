"""A verification: the steps that it computes again, its conclusion, and its certificates."""

import json
from pathlib import Path

import pytest

from stratagem.client.course.claims import Claim, ClaimPlace, RunClaims
from stratagem.client.course.views import Phase, RunStatus
from stratagem.client.sdk.run import AsyncRun
from stratagem.client.sdk.verification import (
    Conclusion,
    Difference,
    RunCalls,
    Stretch,
    Verification,
    Verifier,
    certificate,
    check_certificate,
    chosen_steps,
    doubt_of_job,
    read_certificate,
    root_steps,
    stretches,
)
from stratagem.common.base.errors import IntegrityError, InvalidInputError
from tests.jobs import job


@pytest.mark.parametrize(
    ("steps", "kept", "expected"),
    [
        ([0, 2, 4], {}, [Stretch(None, -1, 4)]),
        ([4], {2: 1, 4: 2}, [Stretch(1, 2, 4)]),
        ([2, 4, 20], {10: 5, 18: 9}, [Stretch(None, -1, 4), Stretch(9, 18, 20)]),
        # A state in the middle of what is computed anyway saves nothing.
        ([2, 4, 6], {4: 2}, [Stretch(None, -1, 6)]),
        ([], {2: 1}, []),
    ],
)
def test_stretches_begin_with_the_newest_state_before_them(
    steps: list[int], kept: dict[int, int], expected: list[Stretch]
) -> None:
    assert stretches(steps, kept) == expected


STATUS = RunStatus(
    run_id="r", name="r", phase=Phase.COMPLETED, reason="", strategy_phase="", strategy="Local",
    step=4, num_steps=4, segment=2, num_segments=2, submitted_at_s=0.0, ended_at_s=1.0, commits=(),
    metrics={}, worker_ids=(), error=None, job=job().document(), event_index=0, engine="solo",
    reproducible=True,
)  # fmt: skip


def claims_of(num: int) -> RunClaims:
    claims = RunClaims()
    for segment in range(num):
        place = ClaimPlace("", 2 * segment)
        claims.by_place[place] = Claim(place, f"d{segment}", segment, (), "")
    return claims


def test_segments_and_samples_choose_the_same_steps_each_time() -> None:
    claims = claims_of(1000)
    assert chosen_steps(claims, None, None, 0) == set(range(0, 2000, 2))
    assert chosen_steps(claims, {3, 7}, None, 0) == {6, 14}
    sample = chosen_steps(claims, None, 0.25, 0)
    assert 200 < len(sample) < 300
    assert sample == chosen_steps(claims, None, 0.25, 0) != chosen_steps(claims, None, 0.25, 1)
    with pytest.raises(InvalidInputError, match="segments: 1000 is no committed segment"):
        chosen_steps(claims, {2, 1000}, None, 0)
    for share in (0.0, 1.5):
        with pytest.raises(InvalidInputError, match=f"sample: {share} is not above 0"):
            chosen_steps(claims, None, share, 0)


def test_each_place_belongs_to_the_state_of_the_root_that_follows() -> None:
    claims = RunClaims()
    places = [
        ClaimPlace("", 0),
        ClaimPlace("a", 4),
        ClaimPlace("", 1, 0),
        ClaimPlace("", 1),
        ClaimPlace("a", 4, None, 1),
    ]
    for place in places:
        claims.by_place[place] = Claim(place, "d", 0, (), "")
    assert list(map(root_steps(claims).get, places)) == [0, 1, 1, 1, 1]
    members = RunClaims()
    for place in (
        first := [ClaimPlace("member0", 4), ClaimPlace("member1", 4), ClaimPlace("member0", 8)]
    ):
        members.by_place[place] = Claim(place, "d", 0, (), "")
    assert list(map(root_steps(members).get, first)) == [4, 4, 8]


def test_jobs_whose_bits_are_not_determined_are_in_doubt() -> None:
    assert not doubt_of_job(job())
    assert "in any order" in doubt_of_job(job(execution={"deterministic": False}))


@pytest.mark.parametrize(
    ("third", "conclusion"),
    [
        ("again", Conclusion.RUN),
        ("run", Conclusion.VERIFIER),
        ("x", Conclusion.JOB),
        (None, Conclusion.OPEN),
    ],
)
def test_the_majority_of_three_executions_says_who_is_wrong(
    third: str | None, conclusion: Conclusion
) -> None:
    run, again, another = (
        Claim(ClaimPlace("", 2), digest, 1, (), "") for digest in ("run", "again", third or "")
    )
    difference = Difference(run, again, "r", None if third is None else another)
    assert Verification("r", (), {}, (), difference).conclusion is conclusion
    assert Verification("r", (), {}, ()).conclusion is Conclusion.EQUAL


async def not_called(*_: object) -> AsyncRun:
    raise AssertionError


CALLS = RunCalls(not_called, not_called)


def test_other_numerics_are_no_difference() -> None:
    place = ClaimPlace("", 2)
    claims = RunClaims()
    claims.by_place[place] = Claim(place, "a", 1, (), "intel")
    shown: list[tuple[Claim, Claim]] = []
    verifier = Verifier(CALLS, STATUS, claims, lambda *pair: shown.append(pair), {}, {})
    assert verifier.compare(Claim(place, "b", 1, ("w",), "amd"), "other") is None
    assert verifier.unverified == {place: "numerics differ: intel in the run, amd here"}
    assert verifier.compare(Claim(place, "b", 1, ("w",), "intel"), "other") is not None
    assert verifier.compare(Claim(place, "a", 1, ("w",), "intel"), "other") is None
    assert verifier.equal == [claims.by_place[place]]
    assert len(shown) == 3


# ---- Certificates ----


def test_a_certificate_is_checked_against_the_claims_of_its_run(tmp_path: Path) -> None:
    claims = claims_of(3)
    found = Verification("r", tuple(claims.by_place.values()), {ClaimPlace("a", 1): "why"}, ("w0",))
    document = certificate(STATUS, found, 12.5)
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(document))
    assert read_certificate(path) == document
    assert check_certificate(document, claims) == 3
    with pytest.raises(IntegrityError, match="run r has no such state"):
        check_certificate(document, claims_of(2))
    path.write_text(json.dumps(document).replace('"d1"', '"d7"'))
    with pytest.raises(IntegrityError, match="was changed after it was written"):
        read_certificate(path)
    for text in ("{", "[]", '{"run": "r"}'):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="is no certificate"):
            read_certificate(path)


def test_what_differs_is_not_certified() -> None:
    run, again = (Claim(ClaimPlace("", 2), digest, 1, (), "") for digest in ("a", "b"))
    found = Verification("r", (), {}, (), Difference(run, again, "other"))
    with pytest.raises(InvalidInputError, match="nothing is certified"):
        certificate(STATUS, found, 0.0)
