"""Verify a run: compute again the claims (digests of states and updates) that it has recorded, by
runs of the same job, and compare.

A verifying run takes the path of every other run: the same plan, from the same base, on workers of
the same numerics. It begins with a stored state of the verified run where a resumed run would
compute the same bits, and otherwise with the beginning of the job. It is deleted when its claims
are equal, and kept when one differs.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from stratagem.client.course.claims import RULES, Claim, ClaimPlace, Input, RunClaims
from stratagem.client.course.views import Event, RunStatus
from stratagem.client.sdk.run import AsyncRun
from stratagem.client.sdk.verification_plan import (
    Stretch,
    chosen_steps,
    compared_inputs,
    doubt_of_job,
    first_step,
    kept_states,
    other_input,
    root_steps,
    stretches,
    why_incomparable,
)
from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    StratagemError,
    WrongStateError,
)
from stratagem.common.base.ids import new_run_id
from stratagem.common.code.signatures import CERTIFICATE, is_signed, read_public_keys, sign
from stratagem.common.job import JobSpec, with_fields
from stratagem.common.numerics import rules
from stratagem.common.numerics.verification import Conclusion, conclude
from stratagem.v1 import coordinator_pb2 as pb

OnClaim = Callable[[Claim, Claim], None]
"""A function that is given each compared claim of the run, and the second execution's claim."""
MIN_RETENTION: Final = 4
"""The least number of commits that a verifying run keeps, since it stops only after a
difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A claim of the run that a second execution contradicts, with hints at the cause."""

    claim: Claim
    again: Claim
    run_id: str
    """The id of the verifying run that made the other claim; this run is kept."""
    third: Claim | None = None
    why_open: str = ""
    """The reason why there is no claim by a third execution."""
    step: int | None = None
    """The first recorded step in which the step histories of both executions differ."""
    series: str = ""
    """The series of the step history that differs in that step."""
    values: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification: the claims that are equal, those left out, and a difference."""

    run_id: str
    equal: tuple[Claim, ...]
    """The claims for which the second execution had the same digest."""
    unverified: Mapping[ClaimPlace, str]
    """The chosen claims that were not compared, with the reason."""
    workers: tuple[str, ...]
    """The workers that computed the compared claims in verifying runs."""
    difference: Difference | None = None

    @property
    def conclusion(self) -> Conclusion:
        """Return who is wrong, by the majority of three executions."""
        if self.difference is None:
            return Conclusion.EQUAL if self.equal else Conclusion.NOTHING
        run, again, third = self.difference.claim, self.difference.again, self.difference.third
        return conclude(run.digest, again.digest, None if third is None else third.digest)


# ---- Execution ----


class RunCalls(NamedTuple):
    """The client's calls that a verification makes: get a run by its id, and submit a job."""

    get: Callable[[str], Awaitable[AsyncRun]]
    submit: Callable[[JobSpec, str], Awaitable[AsyncRun]]


@dataclass(slots=True)
class Verifier:
    """Computes the claims of one run again in verifying runs, and compares the digests."""

    runs: RunCalls
    status: RunStatus
    claims: RunClaims
    on_claim: OnClaim
    stored: Mapping[int, int]
    """The segment of each stored state that a verifying run may begin with, keyed by step."""
    inputs: Mapping[Input, Any]
    """The inputs of the run that a verifying run must have, too, such as the number of rows."""
    root_steps: Mapping[ClaimPlace, int]
    equal: list[Claim] = field(default_factory=list)
    unverified: dict[ClaimPlace, str] = field(default_factory=dict)
    workers: dict[str, None] = field(default_factory=dict)

    async def verify(self, stretch: Stretch) -> Difference | None:
        """Compute the claims of some steps again, up to the first difference, which is returned."""
        wanted = {
            place
            for place, claim in self.claims.by_place.items()
            if not claim.doubt and stretch.from_step < self.root_steps[place] <= stretch.to_step
        }
        if not wanted:
            return None
        run_id = self._new_id()
        again, reason = await self._compute(stretch, wanted, run_id, self._compared, keeps=True)
        if reason:
            self.unverified |= dict.fromkeys(wanted, reason)
        if again is None or not self._differs(again):
            return None
        difference = Difference(self.claims.by_place[again.place], again, run_id)
        try:
            return await self._explained(difference)
        except BaseException:
            await asyncio.shield(self._end(run_id, keeps=False))
            raise

    def _differs(self, again: Claim) -> bool:
        return again.digest != self.claims.by_place[again.place].digest

    def _compared(self, run: Claim, again: Claim) -> None:
        self.on_claim(run, again)
        self.workers.update(dict.fromkeys(again.workers))
        if again.digest == run.digest:
            self.equal.append(run)

    async def _compute(
        self,
        stretch: Stretch,
        wanted: set[ClaimPlace],
        run_id: str,
        on_claim: OnClaim,
        *,
        keeps: bool = False,
    ) -> tuple[Claim | None, str]:
        """Run a stretch of steps until a wanted claim differs, or all are removed from `wanted`.

        Return the claim that was compared last, and the reason why the run ended early, or "" if it
        has compared what it should: if the claim differs, there is no reason. The run is deleted,
        however this call ends, unless `keeps` is set and a claim differs.
        """
        is_kept = False
        try:
            run = await self.runs.submit(self._job(stretch), run_id)
            last, reason = await self._compare(run, stretch, wanted, on_claim)
            is_kept = keeps and last is not None and self._differs(last)
            return last, reason
        finally:
            await asyncio.shield(self._end(run_id, keeps=is_kept))

    async def _compare(
        self, run: AsyncRun, stretch: Stretch, wanted: set[ClaimPlace], on_claim: OnClaim
    ) -> tuple[Claim | None, str]:
        new, last = RunClaims(), None
        async with aclosing(run.watch()) as items:
            async for event in items:
                if not isinstance(event, Event):
                    continue
                if reason := other_input(self.inputs, event):
                    return last, reason
                for again in new.add(event):
                    mine = self.claims.by_place.get(again.place)
                    if mine is None or self.root_steps[again.place] <= stretch.from_step:
                        continue
                    if reason := why_incomparable(mine, again):
                        return last, reason
                    if again.place not in wanted:
                        continue
                    differs = self._differs(again)
                    if differs and not (await run.status()).reproducible:
                        return last, "timing or machines have decided something in a verifying run"
                    wanted.discard(again.place)
                    last = again
                    on_claim(mine, again)
                    if differs or not wanted:
                        return last, ""
        return last, f"the verifying run ended: {(await run.status()).reason}"

    def _job(self, stretch: Stretch) -> JobSpec:
        job, run_id = JobSpec.parse(dict(self.status.job)), self.status.run_id
        values: dict[str, Any] = {
            "retention": max(job.retention, MIN_RETENTION),
            "verification": None,  # else a verifying run would itself correct what is to be found
        }
        if stretch.base is not None:
            values["initial"] = {"run": run_id, "which": str(stretch.base), "resume": True}
        return with_fields(job, values)

    def _new_id(self) -> str:
        return new_run_id(f"verify-{self.status.run_id[:40]}")

    async def _end(self, run_id: str, *, keeps: bool) -> None:
        """Stop a verifying run, and delete it unless it is kept. The result does not depend on
        that: if the coordinator refuses or is away, the run is left behind."""
        with suppress(StratagemError):
            run = await self.runs.get(run_id)
            if not (await run.status()).phase.is_final:
                with suppress(WrongStateError):  # it has ended by now
                    await run.cancel()
            await run.wait()
            if not keeps:
                await run.delete()

    async def _explained(self, difference: Difference) -> Difference:
        """Return the difference with the first step that differs, and a third execution's claim."""
        place = difference.claim.place
        (stretch,) = stretches([self.root_steps[place]], self.stored)
        third, reason = None, ""
        try:
            third, reason = await self._compute(
                stretch, {place}, self._new_id(), lambda _run, _again: None
            )
        except StratagemError as error:
            reason = str(error)
        difference = replace(difference, third=third, why_open=reason)
        with suppress(StratagemError):
            mine, theirs = [
                await (await self.runs.get(run_id)).history(parties=place.party)
                for run_id in (self.status.run_id, difference.run_id)
            ]
            if first := first_step(mine, theirs):
                step, series, values = first
                return replace(difference, step=step, series=series, values=values)
        return difference


async def verify(
    runs: RunCalls,
    run_id: str,
    *,
    segments: Collection[int] | None = None,
    sample: float | None = None,
    on_claim: OnClaim = lambda _run, _again: None,
) -> Verification:
    """Compute the claims of an ended run again: all of them, those of some segments, or of a
    sample.

    Raises WrongStateError for a run that has not ended or claims nothing, and InvalidInputError for
    segments that it has not committed.
    """
    run = await runs.get(run_id)
    status = await run.status()
    if not status.phase.is_final:
        raise WrongStateError(f"run {run_id} still trains ({status.phase}); verify it at its end")
    claims, job = await claims_of(run), JobSpec.parse(dict(status.job))
    if not claims.by_place:
        raise WrongStateError(f"run {run_id} has committed nothing that could be verified")
    steps, places = chosen_steps(claims, segments, sample, job.seed), root_steps(claims)
    chosen = [claim for place, claim in claims.by_place.items() if places[place] in steps]
    doubt = doubt_of_job(job, claims.inputs.get((RULES, ""), rules.CURRENT))
    if not doubt and not status.reproducible and not claims.doubt:
        doubt = "timing or machines have decided its bits, and its events do not tell where"
    unverified = {c.place: doubt or c.doubt for c in chosen if doubt or c.doubt}
    stored, inputs = kept_states(job, status), compared_inputs(job, claims.inputs)
    verifier = Verifier(
        runs, status, claims, on_claim, stored, inputs, places, unverified=unverified
    )
    clear = {places[claim.place] for claim in chosen if claim.place not in unverified}
    difference = None
    for stretch in stretches(clear, stored):
        difference = await verifier.verify(stretch)
        if difference is not None:
            break
    workers, equal = tuple(verifier.workers), tuple(verifier.equal)
    verification = Verification(run_id, equal, verifier.unverified, workers, difference)
    await _record(run, verification)
    return verification


async def _record(run: AsyncRun, verification: Verification) -> None:
    """Store the result with the run; it is no error if the coordinator is too old or refuses."""
    result = pb.VerificationResult(
        conclusion=verification.conclusion,
        num_equal=len(verification.equal),
        num_unverified=len(verification.unverified),
        workers=verification.workers,
    )
    with suppress(StratagemError):
        await run.record_verification(result)


async def claims_of(run: AsyncRun) -> RunClaims:
    """Return the claims that a run has made so far."""
    claims = RunClaims()
    async for page in run.past():
        for event in page:
            claims.add(event)
    return claims


# ---- Certificates ----
#
# A certificate carries the SHA-256 of its own canonical JSON, which shows damage, and on request a
# signature of it.

VERSION: Final = 1
_FIELDS: Final = ("certificate", "run", "job", "verified", "unverified", "workers", "time_s")


def certificate(
    status: RunStatus, verification: Verification, time_s: float, key: Path | None = None
) -> dict[str, Any]:
    """Return the certificate of a verification as plain JSON values, signed if a key is given.

    Raises InvalidInputError for a verification that has found a difference, or nothing equal.
    """
    if verification.difference is not None:
        text = f"run {verification.run_id} has a state that differs, so nothing is certified"
        raise InvalidInputError.at("--certificate", text)
    if not verification.equal:
        text = f"nothing of run {verification.run_id} was verified, so nothing is certified"
        raise InvalidInputError.at("--certificate", text)
    body = {
        "certificate": VERSION,
        "run": verification.run_id,
        "job": _job_digest(status),
        "verified": [
            {"place": list(claim.place), "digest": claim.digest, "numerics": claim.numerics}
            for claim in verification.equal
        ],
        "unverified": {str(place): reason for place, reason in verification.unverified.items()},
        "workers": list(verification.workers),
        "time_s": time_s,
    }
    signature = {} if key is None else {"signature": sign(_digest(body), key, CERTIFICATE)}
    return {**body, "sha256": _digest(body), **signature}


def read_certificate(path: Path, key: Path | None = None) -> Mapping[str, Any]:
    """Return the certificate in a file. key: a file of keys, one of which must have signed it.

    Raises InvalidInputError if the file is no certificate, IntegrityError if the certificate was
    changed or is not signed by such a key.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError.at("RUN", f"{path} is no certificate: {error}") from error
    if not isinstance(document, dict) or set(document) - {"signature"} != {*_FIELDS, "sha256"}:
        raise InvalidInputError.at("RUN", f"{path} is no certificate of a verified run")
    body = {name: document[name] for name in _FIELDS}
    if _digest(body) != document["sha256"]:
        raise IntegrityError(f"{path} was changed after it was written: its digest is another one")
    if key is not None:
        signature = str(document.get("signature", ""))
        if not signature or not is_signed(
            document["sha256"], signature, read_public_keys(key), CERTIFICATE
        ):
            raise IntegrityError(f"{path} is signed by none of the keys in {key}")
    if document["certificate"] != VERSION or not document["verified"]:
        text = f"is a certificate of version {document['certificate']}; known is {VERSION}"
        raise InvalidInputError.at("RUN", f"{path} {text if document['verified'] else 'is empty'}")
    return document


def check_certificate(document: Mapping[str, Any], status: RunStatus, claims: RunClaims) -> int:
    """Return the number of digests that a certificate shares with the claims of its run. Raises
    IntegrityError if it is about another job, or has a digest that the run has not recorded."""
    if document["job"] != _job_digest(status):
        raise IntegrityError(f"certificate: run {document['run']} has another job")
    recorded = {tuple(place): claim.digest for place, claim in claims.by_place.items()}
    for record in document["verified"]:
        if recorded.get(tuple(record["place"])) != record["digest"]:
            raise IntegrityError(
                f"certificate: run {document['run']} has no such state: {record['place']}, "
                f"{record['digest']}"
            )
    return len(document["verified"])


def _job_digest(status: RunStatus) -> str:
    return hashlib.sha256(JobSpec.parse(dict(status.job)).canonical_json().encode()).hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
