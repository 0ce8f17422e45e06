"""The lines that `stratagem verify` and `stratagem compare --bits` print, and what they refuse."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from stratagem.client.cli.verify import as_json, describe, different_bits, read_segments
from stratagem.client.course.claims import Claim, ClaimPlace
from stratagem.client.sdk.blocking import Client
from stratagem.client.sdk.verification import Difference, Verification
from stratagem.common.base.errors import InvalidInputError
from tests.client.cli.command_line import invoke
from tests.client.run_facts import BUILT, claims_of, committed, formed, received


def test_segments_are_numbers_and_ranges() -> None:
    assert read_segments("3,7:9") == {3, 7, 8, 9}
    assert read_segments(" 3 , 7 : 7") == {3, 7}
    for text in ("", "x", "3:", ":3", "3,,4", "-1", "1:x"):
        with pytest.raises(InvalidInputError, match="is not such as 3,7:9"):
            read_segments(text)
    for text in ("7:3", "0:99999999999"):
        with pytest.raises(InvalidInputError, match=f"'{text}' names none, or more than 1000000"):
            read_segments(text)


AT = ("--coordinator", "127.0.0.1:1")


def test_what_cannot_be_written_or_asked_is_refused_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    for path in (tmp_path, tmp_path / "missing" / "c.json"):
        done = invoke("verify", "r", "--certificate", path, *AT)
        assert done.exit_code == 1
        assert f"--certificate: {path} exists, or its folder does not" in done.output
    # A key signs a certificate, and needs one that can be written.
    done = invoke("verify", "r", "--key", tmp_path / "key", *AT)
    assert "--key: signs a certificate; add --certificate FILE" in done.output
    done = invoke("verify", "r", "--key", tmp_path / "key", "--certificate", tmp_path, *AT)
    assert f"--certificate: {tmp_path} exists" in done.output
    for option in (("--sample", 0.5), ("--segments", "1"), ("--format", "json")):
        done = invoke("verify", "c.json", *option, *AT)
        assert "c.json is a certificate, and is checked as a whole" in done.output


def difference(place: ClaimPlace, **more: object) -> Verification:
    run, again = (Claim(place, digest, 3, (), "") for digest in ("a", "b"))
    return Verification("r", (), {}, (), Difference(run, again, "verify-r", **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("differs", [True, False])
def test_no_certificate_is_written_of_what_differs_or_of_nothing(
    differs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    claim = Claim(ClaimPlace("", 4), "d", 2, (), "")
    nothing = Verification("r", (), {claim.place: "why"}, ())
    found = replace(difference(ClaimPlace("", 6)), equal=(claim,)) if differs else nothing
    monkeypatch.setattr(Client, "verify", lambda *_, **__: found)
    path = tmp_path / "certificate.json"
    done = invoke("verify", "r", "--certificate", path, *AT)
    assert done.exit_code == (4 if differs else 3)
    assert "was not written: nothing is certified" in done.output
    assert not path.exists()


def test_workers_that_verify_what_they_have_computed_are_told() -> None:
    claim = Claim(ClaimPlace("", 2), "d", 1, ("a", "b"), "")
    for workers, is_told in ((("a",), True), (("b", "c"), False)):
        lines = list(describe(Verification("r", (claim,), {}, workers), 1.0))
        assert lines[0] == f"verified 1 of 1 digest on {', '.join(workers)} in 1.0 s"
        assert [line.startswith("these workers had computed") for line in lines[1:]] == (
            [True] * is_told
        )


@pytest.mark.parametrize(("third", "suspect"), [("b", "a"), ("a", "c")])
def test_who_is_suspected_has_computed_what_no_other_execution_has(
    third: str, suspect: str
) -> None:
    place = ClaimPlace("", 6)
    run, other = Claim(place, "a", 3, ("a",), ""), Claim(place, "b", 3, ("c",), "")
    last = Claim(place, third, 3, ("d",), "")
    found = Verification("r", (), {}, (), Difference(run, other, "verify-r", last))
    *_, line = describe(found, 1.0)
    assert line == f"suspect {suspect}; code or data that have changed since the run look the same"
    known = as_json(found)["difference"]
    assert (known["third"], known["third_workers"]) == (third, ["d"])
    same = Difference(run, replace(other, workers=("a", "c")), "verify-r", last)
    *_, line = describe(Verification("r", (), {}, (), same), 1.0)
    assert "both had the same workers, so have other workers verify it" in line


def test_only_a_state_of_the_run_can_be_downloaded() -> None:
    lines = list(describe(difference(ClaimPlace("", 6)), 1.0))
    assert "the other state is kept: stratagem download verify-r --which 3" in lines
    for place in (
        ClaimPlace("client0", 6),
        ClaimPlace("", 6, 1),
        ClaimPlace("", 6, kind="average"),
    ):
        assert "the verifying run is kept: verify-r" in list(describe(difference(place), 1.0))


def test_a_failed_third_execution_says_why() -> None:
    *_, last = describe(difference(ClaimPlace("", 6), why_open="numerics differ"), 1.0)
    assert last == "who is wrong is open, as there is no third execution: numerics differ"


def test_reasons_name_one_place_and_count_the_others() -> None:
    places = [ClaimPlace("", step) for step in (2, 4, 6)]
    reasons = dict(zip(places, ("why", "why", "other"), strict=True))
    assert list(describe(Verification("r", (), reasons, ()), 1.0)) == [
        "not verified: state after 2 steps and 1 more: why",
        "not verified: state after 6 steps: other",
        "verified 0 of 3 digests in 1.0 s",
    ]


def test_values_that_are_not_finite_are_text_in_json() -> None:
    found = difference(ClaimPlace("", 6), step=3, series="loss", values=(math.nan, 1.5))
    plain = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert plain["difference"]["values"] == ["nan", 1.5]


def test_runs_that_share_no_place_differ() -> None:
    run, other = claims_of(BUILT, committed(1, 2, "a")), claims_of(received(1, 0, "u"))
    assert list(different_bits(run, other, ("r", "s"))) == [
        "only in r: state after 0 steps and 1 more",
        "only in s: update of client 0 in round 1",
    ]
    assert list(different_bits(run, run, ("r", "r"))) == []


def test_runs_are_equal_up_to_a_place_that_both_have() -> None:
    run = claims_of(BUILT, committed(1, 2, "a"), formed("x"), committed(2, 4, "b"))
    other = claims_of(BUILT, formed("y", fingerprint="m"), committed(2, 4, "c"))
    assert list(different_bits(run, other, ("r", "s"))) == [
        "only in r: state after 2 steps",
        "equal up to state after 0 steps",
        "state after 4 steps: b by x and c by y",
        "numerics differ: n and m",
    ]
