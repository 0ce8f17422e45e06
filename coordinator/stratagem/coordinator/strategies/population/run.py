"""This module defines the run value of a population, and derives its decisions from the states of
its members.

Every member is a party of its own (`member0`, `member1`, ...) that trains generation after
generation under an inner strategy. The functions are pure; strategy.py calls them.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from stratagem.common.base.ids import NO_DIGEST, Digest, Party, child_party
from stratagem.common.job import JobSpec, member_job
from stratagem.common.job.search_space import SearchSpace
from stratagem.common.numerics.verification import joint_digest
from stratagem.common.schema.json import JSON
from stratagem.common.strategy import Federated, Local, PopulationBased, Strategy
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    Copied,
    ErrorRecord,
    GenerationClosed,
    MemberEvolved,
    ModelBuilt,
    PartyFailed,
    PopulationFormed,
    RunFailed,
    Setting,
)
from stratagem.coordinator.core.strategy_contract import Child, Origin, RejectedClient, Strategies
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated.rejections import together
from stratagem.coordinator.strategies.population.evolution import (
    donors,
    draw,
    explored,
    known_structure,
    rank,
    stream,
    with_parents,
)

# ---- Member failures ----
#
# Failures are counted by kind, together with the commonest reason.
#
# A member that fails alone is replaced by a copy of another one. Many that fail alike have a
# reason that lies in the job, and users should not have to search the log for it.

_MAX_KINDS: Final = 64
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Failures whose reasons differ only in numbers, with the reason of the first failure."""

    pattern: str
    reason: str
    error: ErrorRecord | None
    count: int
    members: frozenset[int]

    def text(self, population_size: int) -> str:
        """Return the reason for people, with the number of members that failed so; if half of them
        did, also that the job seems to be at fault."""
        alike = len(self.members)
        if alike == 1:
            return self.reason
        whose = "; the reason seems to be the job's" if 2 * alike >= population_size else ""
        return f"{alike} of {population_size} members failed alike: {self.reason}{whose}"


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of the members in a whole run, counted by kind."""

    num_failures: int = 0
    kinds: tuple[FailureKind, ...] = ()

    def with_one(self, member: int, failed: PartyFailed) -> "Failures":
        """Return the record with one more failure; a new kind is added only up to a limit."""
        pattern, kinds = _NUMBER.sub("#", failed.reason), list(self.kinds)
        at = next((i for i, kind in enumerate(kinds) if kind.pattern == pattern), None)
        if at is not None:
            kind = kinds[at]
            kinds[at] = replace(kind, count=kind.count + 1, members=kind.members | {member})
        elif len(kinds) < _MAX_KINDS:
            kinds.append(FailureKind(pattern, failed.reason, failed.error, 1, frozenset({member})))
        return Failures(self.num_failures + 1, tuple(kinds))

    def commonest(self) -> FailureKind | None:
        """Return the most frequent kind, the first of equals; None if there are none."""
        return max(self.kinds, key=lambda kind: kind.count, default=None)

    def text(self, population_size: int) -> str:
        """Return the number of failures and their commonest reason, for people; "" if there are
        none."""
        kind = self.commonest()
        if kind is None:
            return ""
        often = "1 failure" if self.num_failures == 1 else f"{self.num_failures} failures"
        return f"{often} of members, most often {kind.text(population_size)}"


# ---- Run value ----


@dataclass(frozen=True, slots=True)
class MemberRun:
    """One member of a population: its party, its hyperparameters, and its scores."""

    child: Child
    params: Mapping[str, JSON]
    schedule: tuple[Setting, ...]
    """The settings that its state was trained with, the current ones last; the schedule of a copy
    begins with that of its donor."""
    generation: int = 1
    """The generation that the member trains now."""
    failure: PartyFailed | None = None
    """The failure because of which the member has no score in this generation."""
    scores: tuple[float | None, ...] = ()
    """The member's scores in past generations, higher is better; None: invalid."""
    rejected: tuple[RejectedClient, ...] = ()
    """Clients of a federation that were rejected before the member went on from another state."""


@dataclass(frozen=True, slots=True)
class PopulationRun:
    party: Party
    strategies: Strategies
    """The available strategies, of which the members use one."""
    generation: int = 1
    """The first generation that is not closed yet."""
    members: tuple[MemberRun, ...] = ()
    structural: frozenset[str] | None = None
    """Hyperparameters that copies take from their donors unchanged; None: see PopulationFormed."""
    failures: Failures = field(default_factory=Failures)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    """The origins of the commits that are kept, keyed by generation."""
    committed: Base | None = None
    """The newest commit, the best state of a closed generation, as a base of the next one; without
    a digest before the first generation is closed, None before the population is formed."""
    best: tuple[float, int] | None = None
    """The best metric of a closed generation (higher is better), and the first such generation."""

    def children(self) -> tuple[Child, ...]:
        """Return the parties of all members of the population."""
        return tuple(member.child for member in self.members)


def spec_of(job: JobSpec) -> PopulationBased:
    assert isinstance(job.strategy, PopulationBased)
    return job.strategy


def space_of(job: JobSpec) -> SearchSpace:
    assert job.search_space is not None
    return job.search_space


def inner_of(job: JobSpec) -> Strategy:
    return spec_of(job).options.inner or Local()


def _segments(job: JobSpec) -> int:
    """Return the number of segments of one generation: a federated member commits every round."""
    return (job.steps_per_generation or 1) if isinstance(inner_of(job), Federated) else 1


# ---- Decisions ----


def form(job: JobSpec, value: PopulationRun) -> PopulationFormed:
    """Return the fact that forms the population, with sampled hyperparameters."""
    spec = spec_of(job)
    drawn = [
        draw(space_of(job).in_order(), stream(job.seed, member, 0))
        for member in range(spec.population_size)
    ]
    structural = tuple(sorted(known_structure(space_of(job))))
    return PopulationFormed(party=value.party, params=tuple(drawn), structural=structural)


def is_scored(member: MemberRun) -> bool:
    """Return True if the member has finished its generation, with a score or with a failure."""
    return member.failure is not None or nested.is_at_horizon(member.child)


def score_of(job: JobSpec, member: MemberRun) -> float | None:
    """Return the member's score in its generation, higher is better; None if it is invalid."""
    evaluation = job.evaluation
    assert evaluation is not None
    if member.failure is not None:
        return None
    metric = nested.progress(member.child).metrics.get(f"{evaluation.split}.{evaluation.best}")
    if metric is None or not math.isfinite(metric):
        return None
    return metric if evaluation.mode == "max" else -metric


def close_generation(job: JobSpec, value: PopulationRun) -> GenerationClosed | RunFailed | None:
    """Return the fact that closes a generation, with its copies, once every member has a score for
    it; the failure of the run if no score is valid; None before."""
    number, spec = value.generation, spec_of(job)
    if spec.options.asynchronous:
        if any(len(member.scores) < number for member in value.members):
            return None
        scores = tuple(member.scores[number - 1] for member in value.members)
    else:
        if not all(is_scored(member) for member in value.members):
            return None
        scores = tuple(score_of(job, member) for member in value.members)
    if all(score is None for score in scores):
        return _all_failed(value)
    evolves = not spec.options.asynchronous and number < spec.generations
    best = max(range(len(scores)), key=lambda m: (rank(scores[m]), -m))
    member = value.members[best]
    progress = nested.progress(member.child)
    assert progress.committed is not None
    return GenerationClosed(
        party=value.party,
        generation=number,
        scores=scores,
        best=best,
        digest=progress.committed.digest,
        step=progress.committed.step,
        metrics=progress.metrics,
        params=trained_with(member, progress.committed.step)[-1].values,
        copied=_evolution(job, value, scores) if evolves else (),
        by_policy=spec.options.asynchronous,
    )


def _evolution(
    job: JobSpec, value: PopulationRun, scores: tuple[float | None, ...]
) -> tuple[Copied, ...]:
    spec = spec_of(job)
    streams = [stream(job.seed, member, value.generation) for member in range(len(scores))]
    copies = donors(spec.exploit, scores, streams).items()
    return tuple(_copied(job, value, m, donor, streams[m]) for m, donor in sorted(copies))


def _copied(job: JobSpec, value: PopulationRun, member: int, donor: int, rng: Random) -> Copied:
    """Return the fact that a member copies a donor's newest commit, with varied hyperparameters."""
    base = nested.progress(value.members[donor].child).committed
    assert base is not None
    params = _explored(job, value, value.members[donor], rng)
    return Copied(member=member, donor=donor, digest=base.digest, step=base.step, params=params)


def _explored(
    job: JobSpec, value: PopulationRun, donor: MemberRun, rng: Random
) -> Mapping[str, JSON]:
    """Return the varied hyperparameters with which a copy of the donor trains."""
    explore, space = spec_of(job).explore, space_of(job)
    if value.structural is None:
        return explored(explore, space, donor.params, rng)
    return explored(explore, space.in_order(), donor.params, rng, value.structural)


def evolve_one(job: JobSpec, value: PopulationRun) -> MemberEvolved | None:
    """Return the fact that the first member to have trained its generation goes on at once, copying
    or not, as asynchronous members do; None if there is none."""
    for number, member in enumerate(value.members):
        if len(member.scores) < member.generation and is_scored(member):
            return _evolved(job, value, number)
    return None


def _evolved(job: JobSpec, value: PopulationRun, number: int) -> MemberEvolved:
    """Return the fact that a member goes on, with its score and, if it copies one, its donor."""
    member, spec = value.members[number], spec_of(job)
    score = score_of(job, member)
    scores = [scored.scores[-1] if scored.scores else None for scored in value.members]
    scores[number] = score
    # A member without any score yet is not a donor, and is not judged here.
    streams = [stream(job.seed, m, member.generation) for m in range(len(scores))]
    is_last = member.generation == spec.generations
    donor = None if is_last else donors(spec.exploit, scores, streams).get(number)
    copied = None if donor is None else _copied(job, value, number, donor, streams[number])
    return MemberEvolved(
        party=value.party,
        generation=member.generation,
        member=number,
        score=score,
        copied=copied,
    )


def trained_with(member: MemberRun, step: int) -> tuple[Setting, ...]:
    """Return the settings that the member's committed state of this step was trained with."""
    return member.schedule[:1] + tuple(s for s in member.schedule[1:] if s.from_step < step)


def rejected(member: MemberRun) -> tuple[RejectedClient, ...]:
    """Return the clients that the member's rounds have rejected; a client may occur several
    times."""
    return (*member.rejected, *nested.progress(member.child).rejected)


def _all_failed(value: PopulationRun) -> RunFailed:
    failures = Failures()
    for number, member in enumerate(value.members):
        if member.failure is not None:
            failures = failures.with_one(number, member.failure)
    # Asynchronous members that have failed may have resumed training.
    commonest = (failures if failures.num_failures else value.failures).commonest()
    why = commonest.text(len(value.members)) if commonest else "no member has a finite score"
    return RunFailed(
        reason=f"generation {value.generation}: no member is valid; {why}",
        error=commonest.error if commonest else None,
    )


# ---- Folds ----


def formed(job: JobSpec, value: PopulationRun, fact: PopulationFormed) -> PopulationRun:
    """Return the run value with the population formed: every member's party has begun."""
    members = tuple(
        MemberRun(
            nested.begin(
                child_party(value.party, f"member{number}"),
                member_job(job, number, params),
                _segments(job),
                value.strategies,
            ),
            params,
            (Setting(from_step=0, values=params),),
        )
        for number, params in enumerate(fact.params)
    )
    structural = None if fact.structural is None else frozenset(fact.structural)
    base = Base(0, 0, NO_DIGEST)
    return replace(value, members=members, structural=structural, committed=base)


def add_structural(job: JobSpec, value: PopulationRun, fact: ModelBuilt) -> PopulationRun:
    """Return the run value with hyperparameters that a built model has shown to be structural."""
    if value.structural is None or not fact.structural:
        return value
    names = with_parents(space_of(job), value.structural | frozenset(fact.structural))
    return replace(value, structural=names)


def closed(job: JobSpec, value: PopulationRun, fact: GenerationClosed) -> PopulationRun:
    """Return the run value in the next generation, which synchronous members begin now."""
    value = with_origin(job, value, fact)
    base = Base(fact.generation, fact.step, fact.digest)
    value = replace(value, generation=fact.generation + 1, committed=base)
    if spec_of(job).options.asynchronous:
        return value
    rows = _rows(value)
    copied = {copy.member: copy for copy in fact.copied}
    members = tuple(
        _next(job, value, number, fact.scores[number], copied.get(number), rows)
        for number in range(len(value.members))
    )
    return replace(value, members=members)


def restored(job: JobSpec, value: PopulationRun, earlier: PopulationRun) -> PopulationRun:
    """Return the population of this party as it goes on from the beginning of a generation, that of
    an earlier run value."""
    members = tuple(
        replace(member, child=_restored(job, value, number, member))
        for number, member in enumerate(earlier.members)
    )
    return replace(earlier, party=value.party, members=members)


def _restored(job: JobSpec, value: PopulationRun, number: int, earlier: MemberRun) -> Child:
    own_job, horizon = member_job(job, number, earlier.params), earlier.child.horizon
    if value.members:
        child = replace(value.members[number].child, job=own_job, horizon=horizon)
    else:
        party = child_party(value.party, f"member{number}")
        child = nested.begin(party, own_job, horizon, value.strategies)
    return nested.restored(child, earlier.child.value)


def digest(value: PopulationRun) -> Digest:
    """Return a digest of the states and hyperparameters with which the members go on."""
    bases = [nested.committed(member.child) for member in value.members]
    digests = [base.digest if base else NO_DIGEST for base in bases]
    settings = [[dict(sorted(member.params.items())), member.scores] for member in value.members]
    return joint_digest((*digests, json.dumps(settings)))


def with_origin(job: JobSpec, value: PopulationRun, fact: GenerationClosed) -> PopulationRun:
    """Return the run value with the origin of the new commit: its member and its settings.

    Older origins are dropped, except those of the commits that are kept: the newest, and the best.
    """
    evaluation = job.evaluation
    assert evaluation is not None
    metric = fact.metrics.get(f"{evaluation.split}.{evaluation.best}", math.nan)
    score, best = metric if evaluation.mode == "max" else -metric, value.best
    if not math.isnan(score) and (best is None or score > best[0]):
        best = score, fact.generation
    origin = Origin(fact.best, trained_with(value.members[fact.best], fact.step))
    newest = fact.generation - job.retention
    origins = {
        generation: members
        for generation, members in {**value.origins, fact.generation: origin}.items()
        if generation > newest or (best is not None and generation == best[1])
    }
    return replace(value, origins=origins, best=best)


def evolved(job: JobSpec, value: PopulationRun, fact: MemberEvolved) -> PopulationRun:
    """Return the run value after one member has gone on to its next generation alone."""
    members = list(value.members)
    members[fact.member] = _next(job, value, fact.member, fact.score, fact.copied, _rows(value))
    return replace(value, members=tuple(members))


def _rows(value: PopulationRun) -> Mapping[str, int]:
    """Return the number of rows per split, from any member that has built the model."""
    counts = (nested.progress(member.child).num_rows for member in value.members)
    return next((rows for rows in counts if rows), {})


def _next(
    job: JobSpec,
    value: PopulationRun,
    number: int,
    score: float | None,
    copied: Copied | None,
    rows: Mapping[str, int],
) -> MemberRun:
    """Return the member with its score added, ready for the next generation if there is one."""
    member, segments = value.members[number], _segments(job)
    generation = member.generation
    scored = replace(member, scores=(*member.scores, score))
    if generation == spec_of(job).generations:
        return scored
    horizon = (generation + 1) * segments
    committed = nested.progress(member.child).committed
    num_rows = nested.progress(member.child).num_rows or rows
    params, child = member.params, replace(member.child, horizon=horizon)
    begin: Copied | Base | None = None
    own_job = child.job
    if copied is not None:
        begin, params = copied, copied.params
        before = trained_with(value.members[copied.donor], copied.step)
        now = Setting(from_step=copied.step, values=params)
        scored = replace(scored, schedule=(*before, now))
        own_job = member_job(job, number, params)
    elif member.failure is not None:
        begin = committed  # there was no member to copy: try again from what it last committed
    if begin is not None:
        # Its rows are those of its own seed, whoever it copies, unless its data are others now.
        streams = committed.streams if committed and own_job.data == child.job.data else ""
        base = Base(generation * segments, begin.step, begin.digest, streams)
        scored = replace(scored, rejected=together(rejected(member)))
        child = nested.rebased(child, own_job, base, num_rows, horizon)
    return replace(scored, child=child, params=params, generation=generation + 1, failure=None)
