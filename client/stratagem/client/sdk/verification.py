"""Verify a run: compute its claims again, as runs of the same job, and compare the digests.

A verifying run takes the path of every other run: the same plan, from the same base, on workers of
the same numerics. It begins with a state of the verified run that is still stored, where a resumed
run computes the same bits, and otherwise with the beginning of the job. It is deleted when its
claims are equal, and kept when one differs.
"""

import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from stratagem.client.course.claims import Claim, ClaimPlace, RunClaims
from stratagem.client.course.views import Event, RunStatus
from stratagem.client.history.step_history import History
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import IntegrityError, InvalidInputError, WrongStateError
from stratagem.common.base.ids import new_run_id
from stratagem.common.job import JobSpec, with_fields
from stratagem.common.strategy.strategies import DataParallel, Local, ModelParallel

OnClaim = Callable[[Claim, Claim], None]
"""Called with each claim of the run and the new claim for its place."""
RESUMABLE: Final = (Local, DataParallel, ModelParallel)
"""Strategies of which a run that goes on from a commit has the bits of an undisturbed one."""


class Conclusion(StrEnum):
    """The conclusion of a verification."""

    EQUAL = "EQUAL"
    """No claim that was computed again differs."""
    RUN = "RUN"
    """Two other executions agree with each other, and not with the run."""
    VERIFIER = "VERIFIER"
    """A third execution agrees with the run, and not with the second one."""
    JOB = "JOB"
    """Three executions have three results: the job does not determine its bits."""
    OPEN = "OPEN"
    """A claim differs, and the third execution has failed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A claim of the run that another execution contradicts, and what is known of the cause."""

    claim: Claim
    again: Claim
    run_id: str
    """The verifying run that made the other claim; it is kept."""
    third: Claim | None = None
    step: int | None = None
    """The first recorded step in which the histories of both executions differ."""
    series: str = ""
    """The series that differs there."""
    values: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`."""

    run_id: str
    equal: tuple[Claim, ...]
    """The claims that were computed again with the same digest."""
    unverified: Mapping[ClaimPlace, str]
    """The claims that were not computed again, and the reason."""
    workers: tuple[str, ...]
    """The workers that have computed the claims again."""
    difference: Difference | None = None

    @property
    def conclusion(self) -> Conclusion:
        """Return who is wrong, by the majority of three executions."""
        if self.difference is None:
            return Conclusion.EQUAL
        run, again, third = self.difference.claim, self.difference.again, self.difference.third
        if third is None:
            return Conclusion.OPEN
        if third.digest == again.digest:
            return Conclusion.RUN
        return Conclusion.VERIFIER if third.digest == run.digest else Conclusion.JOB


# ---- The plan ----


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps that one verifying run computes."""

    base: int | None
    """The segment of the run whose stored state is the beginning; None: the beginning of the
    job."""
    from_step: int
    to_step: int


def stretches(steps: Iterable[int], kept: Mapping[int, int]) -> list[Stretch]:
    """Return what to compute so that the states after these steps are reached.

    kept: the segment of each stored state that a run may begin with, by its step.
    """
    found: list[Stretch] = []
    for step in sorted(steps):
        base_step = max((each for each in kept if each < step), default=None)
        if found and (base_step is None or base_step <= found[-1].to_step):
            last = found[-1]
            found[-1] = Stretch(last.base, last.from_step, step)
        elif base_step is None:
            found.append(Stretch(None, -1, step))
        else:
            found.append(Stretch(kept[base_step], base_step, step))
    return found


def chosen_steps(
    claims: RunClaims, segments: Collection[int] | None, sample: float | None, seed: int
) -> set[int]:
    """Return the steps of the states to verify: of the segments, or of a sample that is the same
    each time. Raises InvalidInputError for a segment without a state."""
    root = [claim for place, claim in claims.by_place.items() if not place.party]
    states = {
        claim.segment: claim.place.step
        for claim in root or claims.by_place.values()
        if claim.place.client is None
    }
    if segments is not None:
        if missing := sorted(set(segments) - set(states)):
            last = max(states, default=0)
            text = f"{missing[0]} is no committed segment of this run, which has 0 to {last}"
            raise InvalidInputError.at("segments", text)
        return {states[segment] for segment in segments}
    if sample is None:
        return set(states.values())
    if not 0 < sample <= 1:
        raise InvalidInputError.at("sample", f"{sample} is not above 0 and at most 1")
    return {step for segment, step in states.items() if _share(seed, segment) < sample}


def _share(seed: int, segment: int) -> float:
    digest = hashlib.sha256(f"{seed}/{segment}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2.0**56


def doubt_of_job(job: JobSpec) -> str:
    """Return why another execution of a job may give other bits; empty if it must not."""
    if not job.execution.deterministic:
        return "execution.deterministic: false permits sums in any order"
    return ""


# ---- Execution ----


class RunCalls(NamedTuple):
    """The calls of a client that a verification needs."""

    get: Callable[[str], Awaitable[AsyncRun]]
    submit: Callable[[JobSpec, str], Awaitable[AsyncRun]]


@dataclass(slots=True)
class Verifier:
    """Computes the claims of one run again."""

    runs: RunCalls
    status: RunStatus
    claims: RunClaims
    on_claim: OnClaim
    kept: Mapping[int, int]
    """The segment of each stored state that a verifying run may begin with, by its step."""
    root_steps: Mapping[ClaimPlace, int]
    equal: list[Claim] = field(default_factory=list)
    unverified: dict[ClaimPlace, str] = field(default_factory=dict)
    workers: dict[str, None] = field(default_factory=dict)

    async def verify(self, stretch: Stretch) -> Difference | None:
        """Compute a stretch, up to its end or to the first claim that differs."""
        wanted = self._places(stretch)
        again = await self._begin(stretch)
        difference = None
        async with aclosing(_claims_of(again)) as new_claims:
            async for claim in new_claims:
                if claim.place not in wanted:
                    continue
                wanted.discard(claim.place)
                difference = self.compare(claim, again.run_id)
                if difference or not wanted:
                    break
        status = await _stopped(again)
        if difference is not None:
            return await self._explained(difference, again)
        self.unverified |= dict.fromkeys(wanted, f"the verifying run ended: {status.reason}")
        await again.delete()
        return None

    def compare(self, again: Claim, run_id: str) -> Difference | None:
        """Compare a new claim, which a verifying run has made, with that of the run."""
        run = self.claims.by_place[again.place]
        self.workers.update(dict.fromkeys(again.workers))
        self.on_claim(run, again)
        if run.numerics and again.numerics and run.numerics != again.numerics:
            text = f"numerics differ: {run.numerics} in the run, {again.numerics} here"
            self.unverified[run.place] = text
        elif again.digest != run.digest:
            return Difference(run, again, run_id)
        else:
            self.equal.append(run)
        return None

    async def _explained(self, difference: Difference, again: AsyncRun) -> Difference:
        """Return the difference with the first step that differs, and a third execution."""
        place = difference.claim.place
        mine = await (await self.runs.get(self.status.run_id)).history(parties=place.party)
        first = first_step(mine, await again.history(parties=place.party))
        third = await self._third(place)
        if first is None:
            return replace(difference, third=third)
        step, series, values = first
        return replace(difference, third=third, step=step, series=series, values=values)

    async def _third(self, place: ClaimPlace) -> Claim | None:
        (stretch,) = stretches([self.root_steps[place]], self.kept)
        again = await self._begin(stretch)
        found = None
        async with aclosing(_claims_of(again)) as new_claims:
            async for claim in new_claims:
                if claim.place == place:
                    found = claim
                    break
        await _stopped(again)
        await again.delete()
        return found

    async def _begin(self, stretch: Stretch) -> AsyncRun:
        values: dict[str, Any] = {"retention": 1}
        run_id = self.status.run_id
        if stretch.base is not None:
            values["initial"] = {"run": run_id, "which": str(stretch.base), "resume": True}
        job = with_fields(JobSpec.parse(dict(self.status.job)), values)
        return await self.runs.submit(job, new_run_id(f"verify-{run_id[:40]}"))

    def _places(self, stretch: Stretch) -> set[ClaimPlace]:
        """Return the places of the claims that a stretch makes again."""
        return {
            place
            for place, claim in self.claims.by_place.items()
            if not claim.doubt and stretch.from_step < self.root_steps[place] <= stretch.to_step
        }


def root_steps(claims: RunClaims) -> dict[ClaimPlace, int]:
    """Return for each place the step of the root party's state that follows from it; where the
    root has no states, as in a population, the step of the place."""
    found: dict[ClaimPlace, int] = {}
    following = claims.last_step
    for place in reversed(claims.by_place):
        if not place.party or not claims.last_step:
            following = place.step
        found[place] = following
    return found


async def _claims_of(run: AsyncRun) -> AsyncGenerator[Claim]:
    claims = RunClaims()
    async for event in run.watch():
        claim = claims.add(event) if isinstance(event, Event) else None
        if claim is not None:
            yield claim


async def _stopped(run: AsyncRun) -> RunStatus:
    if not (await run.status()).phase.is_final:
        with suppress(WrongStateError):  # it has ended by now
            await run.cancel()
    return await run.wait()


def first_step(run: History, again: History) -> tuple[int, str, tuple[float, float]] | None:
    """Return the first step, series and values in which two histories differ, over the steps that
    both have; None where they are equal."""
    found: list[tuple[int, str, tuple[float, float]]] = []
    for name, series in run.items():
        other = again.get(name)
        if series.observed or other is None or other.stride != series.stride:
            continue
        steps, left, right = np.intersect1d(series.step, other.step, return_indices=True)
        mine, theirs = series.last[left], other.last[right]
        differ = (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs))
        if differ.any():
            at = int(differ.argmax())
            found.append((int(steps[at]), name, (float(mine[at]), float(theirs[at]))))
    return min(found, default=None)


async def verify(
    runs: RunCalls,
    run_id: str,
    *,
    segments: Collection[int] | None = None,
    sample: float | None = None,
    on_claim: OnClaim = lambda _run, _again: None,
) -> Verification:
    """Compute claims of a run that has ended again, all unless segments or a sample are named.

    Raises WrongStateError for a run that has not ended or claims nothing, and InvalidInputError
    for segments that it has not committed.
    """
    run = await runs.get(run_id)
    status = await run.status()
    if not status.phase.is_final:
        raise WrongStateError(f"run {run_id} still trains ({status.phase}); verify it at its end")
    claims, job = RunClaims.of(await run.events()), JobSpec.parse(dict(status.job))
    if not claims.by_place:
        raise WrongStateError(f"run {run_id} has committed nothing that could be verified")
    if doubt := doubt_of_job(job):
        return Verification(run_id, (), dict.fromkeys(claims.by_place, doubt), ())
    is_resumable = isinstance(job.strategy, RESUMABLE)
    kept = {commit.step: commit.segment for commit in status.commits} if is_resumable else {}
    verifier = Verifier(runs, status, claims, on_claim, kept, root_steps(claims))
    verifier.unverified |= {c.place: c.doubt for c in claims.by_place.values() if c.doubt}
    steps = chosen_steps(claims, segments, sample, job.seed)
    difference = None
    for stretch in stretches(steps, kept):
        difference = await verifier.verify(stretch)
        if difference is not None:
            break
    workers = tuple(verifier.workers)
    return Verification(run_id, tuple(verifier.equal), verifier.unverified, workers, difference)


# ---- Certificates ----
#
# A certificate carries the SHA-256 of its own canonical JSON, which shows damage; it is not
# signed.

VERSION: Final = 1
_FIELDS: Final = ("certificate", "run", "job", "verified", "unverified", "workers", "time_s")


def certificate(status: RunStatus, found: Verification, time_s: float) -> dict[str, Any]:
    """Return the certificate of a verification as plain JSON values.

    Raises InvalidInputError for a verification that has found a difference.
    """
    if found.difference is not None:
        text = f"run {found.run_id} has a state that differs, so nothing is certified"
        raise InvalidInputError.at("--certificate", text)
    job = JobSpec.parse(dict(status.job)).canonical_json()
    body = {
        "certificate": VERSION,
        "run": found.run_id,
        "job": hashlib.sha256(job.encode()).hexdigest(),
        "verified": [
            {"place": list(each.place), "digest": each.digest, "numerics": each.numerics}
            for each in found.equal
        ],
        "unverified": {str(place): reason for place, reason in found.unverified.items()},
        "workers": list(found.workers),
        "time_s": time_s,
    }
    return {**body, "sha256": _digest(body)}


def read_certificate(path: Path) -> Mapping[str, Any]:
    """Return the certificate that a file holds.

    Raises InvalidInputError for a file that is none, IntegrityError for one that was changed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError.at("RUN", f"{path} is no certificate: {error}") from error
    if not isinstance(found, dict) or set(found) != {*_FIELDS, "sha256"}:
        raise InvalidInputError.at("RUN", f"{path} is no certificate of a verified run")
    body = {name: value for name, value in found.items() if name != "sha256"}
    if _digest(body) != found["sha256"]:
        raise IntegrityError(f"{path} was changed after it was written: its digest is another one")
    return found


def check_certificate(found: Mapping[str, Any], claims: RunClaims) -> int:
    """Return how many digests a certificate and the claims of its run have in common.

    Raises IntegrityError for a digest that the run has not recorded.
    """
    recorded = {tuple(place): claim.digest for place, claim in claims.by_place.items()}
    for each in found["verified"]:
        if recorded.get(tuple(each["place"])) != each["digest"]:
            raise IntegrityError(
                f"certificate: run {found['run']} has no such state: {each['place']}, "
                f"{each['digest']}"
            )
    return len(found["verified"])


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
