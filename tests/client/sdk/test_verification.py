"""A verification: the steps that it computes again, its conclusion, and its certificates."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from stratagem.client.course.claims import (
    NUM_ROWS,
    NUM_SAMPLES,
    ROSTER,
    ROWS,
    RULES,
    Claim,
    ClaimPlace,
    RunClaims,
)
from stratagem.client.course.step_history import History
from stratagem.client.course.views import Commit, Event, Phase, RunStatus
from stratagem.client.sdk.run import AsyncRun
from stratagem.client.sdk.verification import (
    Difference,
    RunCalls,
    Verification,
    certificate,
    check_certificate,
    read_certificate,
    verify,
)
from stratagem.client.sdk.verification import (
    _digest as digest_of,
)
from stratagem.client.sdk.verification_plan import (
    Stretch,
    chosen_steps,
    compared_inputs,
    doubt_of_job,
    first_step,
    kept_states,
    ranges,
    root_steps,
    stretches,
    why_incomparable,
)
from stratagem.common.base.errors import (
    InProgressError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    WrongStateError,
)
from stratagem.common.code.signatures import make_keys, sign
from stratagem.common.job import JobSpec
from stratagem.common.numerics import rules
from stratagem.common.numerics.verification import Conclusion, share_of
from stratagem.v1 import coordinator_pb2 as pb
from tests.client.report.reported import recorded
from tests.client.run_facts import (
    Fact,
    assigned,
    closed,
    committed,
    events_of,
    formed,
    received,
)
from tests.crash.jobs import LOCAL, PRIVACY, SETTINGS, crash_job, federated, local_steps
from tests.jobs import document, job


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
    assert len(chosen_steps(claims_of(7), None, 0.001, 0)) == 1, "the smallest sample is a segment"
    by_share = sorted(range(7), key=lambda segment: share_of(0, segment))
    third = share_of(0, by_share[2])
    below = {2 * segment for segment in by_share[:2]}
    assert chosen_steps(claims_of(7), None, third, 0) == below, "as the coordinator chooses"
    states = "this run has states of 0:999"
    with pytest.raises(InvalidInputError, match=f"1000 is no segment with a state; {states}"):
        chosen_steps(claims, {2, 1000}, None, 0)
    with pytest.raises(InvalidInputError, match="none is named"):
        chosen_steps(claims, (), None, 0)
    with pytest.raises(InvalidInputError, match="not possible with --segments"):
        chosen_steps(claims, {2}, 0.5, 0)
    for share in (0.0, 1.5):
        with pytest.raises(InvalidInputError, match=f"sample: {share} is not above 0"):
            chosen_steps(claims, None, share, 0)
    assert ranges([7, 0, 1, 2]) == "0:2,7"


def test_segments_are_those_of_the_whole_run_or_of_its_members_where_it_has_none() -> None:
    claims, members = claims_of(3), claims_of(0)
    place = ClaimPlace("member0", 14)
    claims.by_place[place] = members.by_place[place] = Claim(place, "d", 7, (), "")
    with pytest.raises(InvalidInputError, match="7 is no segment with a state"):
        chosen_steps(claims, {7}, None, 0)
    assert chosen_steps(members, {7}, None, 0) == {14}


def test_each_place_belongs_to_the_state_of_the_root_that_follows() -> None:
    claims = RunClaims()
    places = [
        ClaimPlace("", 0),
        ClaimPlace("a", 4),
        ClaimPlace("", 1, 0),
        ClaimPlace("", 1),
        ClaimPlace("a", 4, None, 1),
        ClaimPlace("", 2, 0),
    ]
    for place in places:
        claims.by_place[place] = Claim(place, "d", 0, (), "")
    assert list(map(root_steps(claims).get, places)) == [0, 1, 1, 1, 1, 2]
    members = RunClaims()
    for place in (
        first := [ClaimPlace("member0", 4), ClaimPlace("member1", 4), ClaimPlace("member0", 8)]
    ):
        members.by_place[place] = Claim(place, "d", 0, (), "")
    assert list(map(root_steps(members).get, first)) == [4, 4, 8]


def test_jobs_whose_bits_are_not_determined_are_in_doubt() -> None:
    assert not doubt_of_job(job())
    assert "in any order" in doubt_of_job(job(execution={"deterministic": False}))
    assert f"a new run follows {rules.CURRENT}" in doubt_of_job(job(), rules.CURRENT - 1)


@pytest.mark.parametrize("unit", ["client", "row"])
def test_noise_that_is_secret_is_in_doubt(unit: str) -> None:
    privacy = {**PRIVACY, "unit": unit, "clip": {"norm": 0.5}, "noise_multiplier": 1.0}
    for noise in ("secret", "seeded"):
        found = doubt_of_job(job(strategy=federated(), privacy={**privacy, "noise": noise}))
        assert ("other noise in each run" in found) == (noise == "secret")


def test_a_run_begins_with_a_stored_state_only_where_it_has_the_bits_of_a_whole_one() -> None:
    status = replace(STATUS, commits=(Commit(3, 6, "d", False, True, {}, ""),))
    assert kept_states(job(), status) == {6: 3}
    for other in (
        job(strategy=federated()),
        job(strategy=local_steps(), steps=12, checkpoint={"every": "3 steps"}),
        job(hyperparameter_schedule=SETTINGS, model=crash_job(LOCAL)["model"]),
    ):
        assert kept_states(other, status) == {}


def test_rosters_are_compared_where_workers_decide_who_a_client_is() -> None:
    inputs = {(kind, ""): 1 for kind in (RULES, ROSTER, ROWS, NUM_ROWS, NUM_SAMPLES)}
    by_tags = {"method": "ByCapability", "required_tags": ["a"]}
    local = {"worker_local": "rows"}
    assert {kind for kind, _ in compared_inputs(job(), inputs)} == {
        RULES,
        ROWS,
        NUM_ROWS,
        NUM_SAMPLES,
    }
    selected = job(strategy=federated() | {"client_selection": by_tags})
    assert compared_inputs(selected, inputs) == inputs
    bound = compared_inputs(job(strategy=federated(), data=local), inputs)
    assert {kind for kind, _ in bound} == {RULES, ROSTER, NUM_SAMPLES}


def test_numerics_that_nobody_has_recorded_are_no_reason() -> None:
    known, other, unknown = (Claim(ClaimPlace("", 2), "d", 1, (), name) for name in ("n", "m", ""))
    assert why_incomparable(known, other) == "numerics differ: n in the run, m here"
    assert why_incomparable(known, unknown) == why_incomparable(unknown, known) == ""


def test_histories_differ_in_the_first_step_that_both_have_recorded() -> None:
    loss = recorded(1, [1.0, math.nan, 3.0, 4.0], certain=4)
    norm, busy, rate = (replace(loss, name=name) for name in ("norm", "busy_s", "rate"))
    run = History([loss, norm, replace(busy, observed=True), rate])

    def differing(*values: float, norms: Sequence[float] = ()) -> str:
        other = recorded(1, list(values), certain=4)
        of_norm = [replace(recorded(1, list(norms), certain=4), name="norm")] if norms else []
        seconds = replace(recorded(1, [9.0] * 4, certain=4), name="busy_s", observed=True)
        coarse = replace(recorded(2, [9.0] * 2, certain=2), name="rate")
        return str(first_step(run, History([other, *of_norm, seconds, coarse])))

    assert differing(1.0, math.nan, 3.0, 4.0) == "None"
    assert differing(1.0, 2.0, 3.0, 9.0) == "(2, 'train.loss', (nan, 2.0))"
    assert differing(1.0, math.nan, math.nan, 4.0) == "(3, 'train.loss', (3.0, nan))"
    both = differing(1.0, math.nan, 9.0, 4.0, norms=[9.0, 2.0, 3.0, 4.0])
    assert both == "(1, 'norm', (1.0, 9.0))"


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
    assert Verification("r", (run,), {}, ()).conclusion is Conclusion.EQUAL
    assert Verification("r", (), {run.place: "why"}, ()).conclusion is Conclusion.NOTHING


# ---- Execution ----

BUILT: Fact = (
    "ModelBuilt",
    {"segment": 0, "step": 0, "digest": "m", "num_rows": {"train": 5}, "rows": "r"},
)
SUBMITTED: Fact = ("RunSubmitted", {"numerics": rules.CURRENT})
BEGUN = (SUBMITTED, formed("w0"), BUILT)
GOOD = (*BEGUN, committed(1, 2, "a"), committed(2, 4, "b"))
WRONG = (*BEGUN, committed(1, 2, "x"), committed(2, 4, "y"))


class Runs:
    """The runs of a coordinator, each with its facts; it ends at once."""

    def __init__(self, run: tuple[Fact, ...], *later: tuple[Fact, ...], **status: Any) -> None:
        self.facts: dict[str, tuple[Fact, ...]] = {"r": run}
        self.later = list(later)
        self.status = {"r": replace(STATUS, **status)}
        self.jobs: list[JobSpec] = []
        self.ended: list[str] = []
        self.deletes = True
        self.recorded: list[pb.VerificationResult] = []
        self.num_watched = 0
        """Events of verifying runs that were read."""

    async def submit(self, spec: JobSpec, run_id: str) -> AsyncRun:
        self.jobs.append(spec)
        self.facts[run_id] = self.later.pop(0)
        self.status[run_id] = replace(STATUS, run_id=run_id, phase=Phase.RUNNING)
        return await self.get(run_id)

    async def get(self, run_id: str) -> AsyncRun:
        if run_id not in self.facts:
            raise NotFoundError(run_id)
        return cast(AsyncRun, OneRun(self, run_id))

    async def verify(self, **options: Any) -> Verification:
        return await verify(RunCalls(self.get, self.submit), "r", **options)


@dataclass
class OneRun:
    runs: Runs
    run_id: str

    async def status(self) -> RunStatus:
        return self.runs.status[self.run_id]

    async def past(self) -> AsyncGenerator[list[Event]]:
        yield events_of(self.runs.facts[self.run_id])

    async def watch(self) -> AsyncGenerator[Event]:
        async for page in self.past():
            for event in page:
                self.runs.num_watched += 1
                yield event

    async def history(self, **_: object) -> History:
        return History(())

    async def cancel(self) -> None:
        self.runs.ended.append("cancelled")

    async def wait(self) -> RunStatus:
        return self.runs.status[self.run_id]

    async def record_verification(self, result: pb.VerificationResult) -> None:
        self.runs.recorded.append(result)

    async def delete(self) -> None:
        if not self.runs.deletes:
            raise InProgressError("still being stopped")
        del self.runs.facts[self.run_id]


async def test_an_equal_run_leaves_no_verifying_run_behind() -> None:
    runs = Runs(GOOD, GOOD, job=document(verification={"sample": 0.5}))
    found = await runs.verify()
    assert (found.conclusion, found.unverified, found.workers) == (Conclusion.EQUAL, {}, ("w0",))
    expected = pb.VerificationResult(conclusion="EQUAL", num_equal=3, workers=["w0"])
    assert runs.recorded == [expected]
    assert [claim.digest for claim in found.equal] == ["m", "a", "b"]
    assert list(runs.facts) == ["r"]
    assert [spec.retention for spec in runs.jobs] == [4], "the state that differs must be kept"
    assert [spec.verification for spec in runs.jobs] == [None], "what it computes is compared"


async def test_the_run_that_differs_is_kept_and_the_third_is_not() -> None:
    runs = Runs(WRONG, GOOD, GOOD)
    found = await runs.verify()
    assert (found.conclusion, found.unverified) == (Conclusion.RUN, {})
    assert found.difference is not None
    assert list(runs.facts) == ["r", found.difference.run_id]
    assert found.difference.claim.place == ClaimPlace("", 2), "the first one"


async def test_a_refused_deletion_loses_no_result() -> None:
    runs = Runs(GOOD, GOOD)
    runs.deletes = False
    assert len((await runs.verify()).equal) == 3


async def test_a_third_execution_that_fails_leaves_open_who_is_wrong() -> None:
    found = await Runs(WRONG, GOOD, BEGUN).verify()
    assert found.conclusion is Conclusion.OPEN
    assert found.difference is not None
    assert found.difference.why_open == "the verifying run ended: "

    class Refusing(Runs):
        async def submit(self, spec: JobSpec, run_id: str) -> AsyncRun:
            if self.jobs:
                raise WrongStateError("no more runs")
            return await super().submit(spec, run_id)

    refused = (await Refusing(WRONG, GOOD).verify()).difference
    assert refused is not None
    assert refused.why_open == "no more runs"


AMD = formed("w1", fingerprint="amd")
AWAY = ("RoundWaits", {"round_num": 1})


@pytest.mark.parametrize(
    ("again", "words"),
    [
        # Their differences propagate to states that were computed with the run's numerics.
        ((BUILT, AMD, committed(1, 2, "x"), formed("w0"), committed(2, 4, "y")), "numerics differ"),
        ((BUILT, AWAY, committed(1, 2, "x")), "in the verifying run, round 1 waited for clients"),
        ((("ModelBuilt", {**BUILT[1], "rows": "s"}), *WRONG[3:]), "the data changed: their first"),
        (
            (("ModelBuilt", {**BUILT[1], "num_rows": {"train": 6}}), *WRONG[3:]),
            "the data changed: {'train': 5} rows in the run, {'train': 6} here",
        ),
        ((("RunSubmitted", {"numerics": 99}), *WRONG[1:]), "numerics rules differ: "),
        ((BUILT,), "the verifying run ended: "),
        # A difference of numerics in a state that is not compared.
        ((BUILT, AMD, committed(1, 2, "a"), formed("w0"), committed(2, 4, "y")), "numerics differ"),
    ],
)
async def test_what_cannot_be_compared_accuses_nobody(again: tuple[Fact, ...], words: str) -> None:
    runs = Runs(GOOD, (formed("w0"), *again))
    found = await runs.verify()
    assert found.difference is None
    assert {place.step for place in found.unverified} >= {2, 4}
    assert all(each.startswith(words) for each in found.unverified.values())
    assert len(found.equal) + len(found.unverified) == 3
    assert list(runs.facts) == ["r"]
    # Nor does a third execution decide, if it cannot be compared.
    if again != (BUILT,):
        third = await Runs(GOOD, WRONG, (formed("w0"), *again)).verify()
        assert third.conclusion is Conclusion.OPEN


async def test_a_run_that_is_not_reproducible_for_an_unknown_reason_is_not_executed() -> None:
    found = await Runs(GOOD, reproducible=False).verify()
    assert len(found.unverified) == 3
    assert "do not tell where" in found.unverified[ClaimPlace("", 2)]


async def test_what_differs_in_an_execution_that_is_not_reproducible_is_not_verified() -> None:
    class Disturbed(Runs):
        async def submit(self, spec: JobSpec, run_id: str) -> AsyncRun:
            run = await super().submit(spec, run_id)
            self.status[run_id] = replace(self.status[run_id], reproducible=False)
            return run

    found = await Disturbed(GOOD, WRONG).verify()
    assert found.difference is None
    assert len(found.unverified) == 2


async def test_updates_after_the_last_state_are_verified() -> None:
    facts = (*BEGUN, assigned(1, c0="w0", c1="w1"), received(1, 0, "u"))
    spec = document(strategy=federated())
    runs = Runs(facts, (*facts, received(1, 1, "v"), closed(1, "", "")), job=spec)
    found = await runs.verify()
    assert ([claim.digest for claim in found.equal], found.unverified) == (["m", "u"], {})
    # Rows of sites are known by their number alone.
    changed = (*facts[:-1], received(1, 0, "x", num_samples=4))
    other = await Runs(facts, changed, job=spec).verify()
    words = "the data of client 0 in round 1 changed: 5 rows in the run, 4 here"
    assert other.unverified == {ClaimPlace("", 1, 0): words}


async def test_only_the_chosen_segments_are_in_doubt() -> None:
    facts = (*GOOD, AWAY, committed(3, 6, "c"))
    runs = Runs(facts, GOOD, reproducible=False)
    found = await runs.verify(segments={1})
    assert ([claim.digest for claim in found.equal], found.unverified) == (["m", "a"], {})
    assert runs.num_watched == len(GOOD) - 1, "the verifying run is stopped there"
    # Nothing is computed for what cannot be compared.
    doubted = await Runs(facts).verify(segments={3})
    reason = "round 1 waited for clients"
    assert (doubted.equal, doubted.unverified) == ((), {ClaimPlace("", 6): reason})
    secret = job(strategy=federated(), privacy=PRIVACY | {"noise": "secret"}).document()
    private = await Runs(GOOD, job=secret, reproducible=False).verify(segments={1})
    (reason,) = private.unverified.values()
    assert reason.startswith("privacy.noise: secret draws other noise")


async def test_a_state_after_a_round_that_waited_is_not_compared_and_its_updates_are() -> None:
    facts = (*BEGUN, assigned(1, c0="w0"), received(1, 0, "u"), AWAY, committed(1, 1, "s"))
    again = (*facts[:-2], committed(1, 1, "t"))
    found = await Runs(facts, again, job=document(strategy=federated())).verify()
    assert found.difference is None
    assert [claim.digest for claim in found.equal] == ["m", "u"]
    assert found.unverified == {ClaimPlace("", 1): "round 1 waited for clients"}


async def test_what_precedes_the_wanted_steps_or_is_new_is_passed_over() -> None:
    """A stored state that others have computed begins a verifying run, whatever their numerics."""
    facts = (*BEGUN, committed(1, 2, "a"), AMD, committed(2, 4, "b"))
    state = {"segment": 1, "step": 2, "digest": "a", "average": "only here"}
    again = (SUBMITTED, AMD, ("ModelBuilt", {**BUILT[1], **state}), committed(2, 4, "b"))
    runs = Runs(facts, again, commits=(Commit(1, 2, "a", False, False, {}, ""),))
    found = await runs.verify(segments={2})
    assert ([claim.digest for claim in found.equal], found.unverified) == (["b"], {})
    assert runs.jobs[0].initial is not None


async def test_an_error_of_the_caller_and_an_interrupt_leave_no_run_behind() -> None:
    def broken(_run: Claim, _again: Claim) -> None:
        raise BrokenPipeError

    runs = Runs(GOOD, GOOD)
    with pytest.raises(BrokenPipeError):
        await runs.verify(on_claim=broken)
    assert (list(runs.facts), runs.ended) == (["r"], ["cancelled"])

    class Endless(Runs):
        reached = asyncio.Event()

        async def submit(self, spec: JobSpec, run_id: str) -> AsyncRun:
            run = await super().submit(spec, run_id)
            if not self.later:
                self.reached.set()
                await asyncio.Event().wait()
            return run

    # In the second execution, and in the third, which ends the second one as well.
    for facts in (GOOD, GOOD), (WRONG, GOOD, GOOD):
        endless = Endless(*facts)
        endless.reached.clear()
        task = asyncio.create_task(endless.verify())
        await endless.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(endless.facts) == ["r"]


# ---- Certificates ----


def test_a_certificate_is_checked_against_the_claims_of_its_run(tmp_path: Path) -> None:
    claims = claims_of(3)
    found = Verification("r", tuple(claims.by_place.values()), {ClaimPlace("a", 1): "why"}, ("w0",))
    document = certificate(STATUS, found, 12.5)
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(document))
    assert read_certificate(path) == document
    assert check_certificate(document, STATUS, claims) == 3
    with pytest.raises(IntegrityError, match="run r has no such state"):
        check_certificate(document, STATUS, claims_of(2))
    other = replace(STATUS, job=job(seed=4).document())
    with pytest.raises(IntegrityError, match="run r has another job"):
        check_certificate(document, other, claims)
    path.write_text(json.dumps(document).replace('"d1"', '"d7"'))
    with pytest.raises(IntegrityError, match="was changed after it was written"):
        read_certificate(path)
    body = {**document, "certificate": 2}
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": digest_of(body)}))
    with pytest.raises(InvalidInputError, match="of version 2; known is 1"):
        read_certificate(path)
    empty = {**document, "verified": []}
    del empty["sha256"]
    path.write_text(json.dumps({**empty, "sha256": digest_of(empty)}))
    with pytest.raises(InvalidInputError, match="is empty"):
        read_certificate(path)
    for text in ("{", "[]", "7", '{"run": "r"}'):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match="is no certificate"):
            read_certificate(path)


def test_a_certificate_is_signed_by_whom_it_says(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        make_keys(tmp_path / name, tmp_path / f"{name}.pub")
    claims = tuple(claims_of(1).by_place.values())
    path = tmp_path / "certificate.json"
    document = certificate(STATUS, Verification("r", claims, {}, ()), 1.0, tmp_path / "mine")
    path.write_text(json.dumps(document))
    assert read_certificate(path, tmp_path / "mine.pub") == read_certificate(path) == document
    with pytest.raises(IntegrityError, match=r"is signed by none of the keys in .*other\.pub"):
        read_certificate(path, tmp_path / "other.pub")
    # A signature of code is none of a certificate.
    signature = sign(document["sha256"], tmp_path / "mine")
    for changed in ({"signature": signature}, {"signature": ""}):
        path.write_text(json.dumps({**document, **changed}))
        with pytest.raises(IntegrityError, match="is signed by none"):
            read_certificate(path, tmp_path / "mine.pub")


def test_what_differs_is_not_certified() -> None:
    run, again = (Claim(ClaimPlace("", 2), digest, 1, (), "") for digest in ("a", "b"))
    found = Verification("r", (), {}, (), Difference(run, again, "other"))
    with pytest.raises(InvalidInputError, match="nothing is certified"):
        certificate(STATUS, found, 0.0)
    nothing = Verification("r", (), {ClaimPlace("", 2): "why"}, ())
    with pytest.raises(InvalidInputError, match="nothing of run r was verified"):
        certificate(STATUS, nothing, 0.0)
