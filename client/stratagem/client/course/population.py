"""Derive the generations of a population from its events: scores, copies and the winner."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from stratagem.client.course.views import Event, RunStatus, number, party_of, undone_from
from stratagem.common.base.errors import NotFoundError
from stratagem.common.base.text import values_text
from stratagem.common.schema.json import JSON, thawed

if TYPE_CHECKING:
    from stratagem.common.job import JobSpec

# ---- Generations ----


@dataclass(frozen=True, slots=True)
class Ancestor:
    """One generation of a state's lineage, with the member that trained the state in it."""

    generation: int
    member: int
    from_step: int
    """The step of the state with which the member began the generation."""
    params: Mapping[str, Any]
    """The hyperparameters, keyed by dotted path of the job, such as "optimizer.lr"."""
    before: "Ancestor | None" = field(default=None, repr=False, compare=False)
    """The ancestor of the generation before: a linked list whose parts members share, because
    copies would grow with the square of the number of generations."""


@dataclass(frozen=True, slots=True)
class MemberInGeneration:
    """The record of one member in one generation."""

    member: int
    now: Ancestor
    """The element of the member's lineage that stands for this generation."""
    score: float | None = None
    """The member's score at the end of the generation; None if not yet known, or if it failed."""
    is_scored: bool = False
    """The member has finished this generation."""

    @property
    def past(self) -> tuple[Ancestor, ...]:
        """Return the lineage of the member's state, from the first generation to this one."""
        return tuple(_back_from(self.now))[::-1]

    @property
    def params(self) -> Mapping[str, Any]:
        """Return the member's hyperparameters, keyed by dotted path of the job."""
        return self.now.params

    @property
    def parent(self) -> int:
        """Return the member whose state this one began from: itself, or the donor it copied."""
        return self.member if self.now.before is None else self.now.before.member


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, with the members that have reached it."""

    number: int
    members: tuple[MemberInGeneration, ...]
    """The members' records, sorted by number."""
    best: int | None = None
    """The member whose state was committed for the generation; None while it is open."""
    step: int = 0
    """The step of the generation's commit."""

    def of(self, member: int) -> MemberInGeneration | None:
        """Return a member's record; None if the member has not reached this generation."""
        return next((record for record in self.members if record.member == member), None)


@dataclass(frozen=True, slots=True)
class Winner:
    """The best member of the closed generations."""

    generation: int
    member: int
    score: float
    params: Mapping[str, Any]
    step: int

    def __str__(self) -> str:
        """Return a text such as "member 3, optimizer.lr 0.031, score 0.94"."""
        values = values_text(self.params)
        return ", ".join(filter(None, [f"member {self.member}", values, f"score {self.score:.4g}"]))


@dataclass(frozen=True, slots=True)
class Population:
    """All generations so far, with winner, lineages and schedules."""

    metric: str
    """The metric that ranks members, such as "test.accuracy"."""
    mode: str
    """"max" or "min": whether higher or lower values of the metric are better."""
    generations: tuple[Generation, ...] = ()

    @property
    def best(self) -> Winner | None:
        """Return the member with the best score of all closed generations, the earliest of equal
        ones; None if no generation is closed."""
        winner: Winner | None = None
        for generation in self.generations:
            member = None if generation.best is None else generation.of(generation.best)
            if member is None or member.score is None:
                continue
            if winner is None or self._is_better(member.score, winner.score):
                values = (member.score, member.params, generation.step)
                winner = Winner(generation.number, member.member, *values)
        return winner

    def lineage(self, member: int, generation: int | None = None) -> tuple[int, ...]:
        """Return for each generation the member that trained this member's state, itself last.

        generation: the generation of the given member, by default its newest one. Raises KeyError
        if the member is not in it.
        """
        return tuple(node.member for node in self._member(member, generation).past)

    def schedule(
        self, member: int, generation: int | None = None
    ) -> tuple[tuple[int, Mapping[str, Any]], ...]:
        """Return (from_step, hyperparameters) for all training behind a member's state, including
        the training of states that it copied. generation: as in `lineage`."""
        return tuple((node.from_step, node.params) for node in self.past(member, generation))

    def past(self, member: int, generation: int | None = None) -> tuple[Ancestor, ...]:
        """Return a member's lineage, without generations that changed neither the member nor the
        hyperparameters. generation: as in `lineage`."""
        past = self._member(member, generation).past
        return tuple(
            node
            for before, node in zip((None, *past), past, strict=False)
            if before is None or (before.member, before.params) != (node.member, node.params)
        )

    def _member(self, member: int, generation: int | None) -> MemberInGeneration:
        wanted = reversed(self.generations)
        records = (entry.of(member) for entry in wanted if generation in (None, entry.number))
        newest = next((record for record in records if record is not None), None)
        if newest is None:
            at = "" if generation is None else f" in generation {generation}"
            raise KeyError(f"there is no member {member}{at}")
        return newest

    def _is_better(self, score: float, other: float) -> bool:
        return score < other if self.mode == "min" else score > other


def population(events: Iterable[Event], job: Mapping[str, Any]) -> Population:
    """Build the Population from a run's events; it is empty for other runs.

    job: the run's job, as in its status, which names the metric.
    """
    folding = PopulationFolding(job)
    for event in events:
        folding.fold(event)
    return folding.population


class PopulationFolding:
    """An incremental reader of the events of a run, or of one party, that builds a Population."""

    def __init__(self, job: Mapping[str, Any], party: str = "") -> None:
        self._party = party
        self._last = _strategy_of(job, party).get("generations")
        self.whole = Population(*_judged_by(job))
        self.records: list[dict[int, MemberInGeneration]] = []
        """The members of each generation, from the first on, keyed by member number."""
        self.closed: dict[int, Mapping[str, Any]] = {}
        self.newest: dict[int, int] = {}
        """The number of the newest generation that each member has begun."""
        self.steps: dict[str, int] = {}
        """The step of the newest commit, keyed by the member's path."""

    @property
    def population(self) -> Population:
        """Return the Population with all generations begun so far."""
        begun = min(
            self._last or len(self.records), len(self.records)
        )  # no generation follows the last one
        generations = (_generation(number, self) for number in range(1, begun + 1))
        return replace(self.whole, generations=tuple(generations))

    def fold(self, event: Event) -> None:
        """Process the next event of the run."""
        fact, last = event.payload, undone_from(event)
        if last is not None and self.records:
            self._return_to(last)
        elif event.kind == "SegmentCommitted":
            self.steps[party_of(event)] = fact["step"]
        elif party_of(event) == self._party:
            self._fold_own(event.kind, fact)

    def _fold_own(self, kind: str, fact: Mapping[str, Any]) -> None:
        match kind:
            case "PopulationFormed":
                first = enumerate(fact["params"])
                self.records = [
                    {m: MemberInGeneration(m, Ancestor(1, m, 0, params)) for m, params in first}
                ]
                self.newest = dict.fromkeys(self.records[0], 1)
            case "MemberEvolved":
                self._score(fact["member"], fact["generation"], fact["score"])
                self._advance({fact["member"]: fact["copied"]})
            case "GenerationClosed":
                self._close(fact)

    def _return_to(self, last: int) -> None:
        """Forget what followed the generation `last`, as the run trains it again."""
        begun = self.records[last].items()
        unscored = {m: replace(member, score=None, is_scored=False) for m, member in begun}
        self.records = [*self.records[:last], unscored]
        self.closed = {number: fact for number, fact in self.closed.items() if number <= last}
        self.newest = dict.fromkeys(unscored, last + 1)

    def _close(self, fact: Mapping[str, Any]) -> None:
        generation = fact["generation"]
        self.closed[generation] = fact
        if fact.get("by_policy"):  # each member has advanced by itself
            return
        for member, score in enumerate(fact["scores"]):
            self._score(member, generation, score)
        copies = {copy["member"]: copy for copy in fact["copied"]}
        self._advance({member: copies.get(member) for member in self.records[generation - 1]})

    def _score(self, member: int, generation: int, score: object) -> None:
        value = number(score)
        sign = -1 if self.whole.mode == "min" else 1
        members = self.records[generation - 1]
        signed = None if math.isnan(value) else sign * value
        members[member] = replace(members[member], score=signed, is_scored=True)

    def _advance(self, copies: Mapping[int, Mapping[str, Any] | None]) -> None:
        """Begin the next generation of these members. copies: for each member, the donor's state
        that it copies, else None; all are from one snapshot of the population."""
        newest = {m: self.records[number - 1][m].now for m, number in self.newest.items()}
        for member, copied in copies.items():
            generation = self.newest[member] + 1
            if copied is None:
                before = newest[member]
                path = f"{self._party}/member{member}" if self._party else f"member{member}"
                step = self.steps.get(path, before.from_step)
                params = before.params
            else:
                step, params = copied["step"], copied["params"]
                before = _known_at(newest[copied["donor"]], step)
            now = Ancestor(generation, member, step, params, before)
            if len(self.records) < generation:
                self.records.append({})
            self.records[generation - 1][member] = MemberInGeneration(member, now)
            self.newest[member] = generation


def _strategy_of(job: Mapping[str, Any], party: str) -> Mapping[str, Any]:
    """Return the strategy of a party as plain values, as far as the job specifies one."""
    strategy = job.get("strategy") or {}
    for _ in filter(None, party.split("/")):
        strategy = (strategy.get("options") or {}).get("inner") or {}
    return strategy


def _back_from(ancestor: Ancestor | None) -> Iterator[Ancestor]:
    while ancestor is not None:
        yield ancestor
        ancestor = ancestor.before


def _known_at(donor: Ancestor, step: int) -> Ancestor:
    """Return the element of the donor's lineage in which the copied state of this step was trained;
    it may be older than the donor's newest element."""
    return next(node for node in _back_from(donor) if node.from_step < step or not node.before)


def _generation(number: int, folding: PopulationFolding) -> Generation:
    members = folding.records[number - 1]
    closed = folding.closed.get(number, {})
    in_order = tuple(members[member] for member in sorted(members))
    return Generation(number, in_order, closed.get("best"), closed.get("step", 0))


def winner_text(run: RunStatus) -> str:
    """Format the winner of a population as "member 3, optimizer.lr 0.031, score 0.94"; "" for other
    runs, and before there is one."""
    best = next((commit for commit in run.commits if commit.is_best), None)
    if best is None or best.member is None:
        return ""
    score = best.metrics.get(_judged_by(run.job)[0], math.nan)
    return str(Winner(best.segment, best.member, score, best.hyperparameters, best.step))


def _judged_by(job: Mapping[str, Any]) -> tuple[str, str]:
    """Return the metric that ranks members, and "max" or "min" for the direction that is better."""
    evaluation = job.get("evaluation") or {}
    metric = f"{evaluation.get('split', 'test')}.{evaluation.get('best') or 'loss'}"
    return metric, evaluation.get("mode") or "max"


# ---- Replay ----
#
# A plain job can train what the winner of a population was trained with, step by step.

SUFFIX: Final = "-replay"
MAX_NAME: Final = 64


def replayed(evolution: Population, job: Mapping[str, Any]) -> "JobSpec":
    """Return a job without a population that reproduces the winner's state bit for bit.

    job: the population's job. The new job is that of the first member of the winner's lineage; from
    the step of each copy on it has the hyperparameters and the seed of the member that made the
    copy. Raises NotFoundError if there is no winner yet.
    """
    winner = evolution.best
    if winner is None:
        raise NotFoundError("no member has a score yet, so there is no winner to replay")
    from stratagem.common.job import JobSpec, member_job

    whole = JobSpec.parse(thawed(job))
    past = evolution.past(winner.member, winner.generation)
    plain = member_job(whole, past[0].member, {}).document()
    settings: list[JSON] = [
        {
            "from_step": node.from_step,
            "seed": member_job(whole, node.member, {}).seed,
            "params": thawed(dict(node.params)),
        }
        for node in _trained(past, winner.step)
    ]
    total = plain.get("steps")
    last: dict[str, JSON] = {} if winner.step == total else {"last_step": winner.step}
    name = whole.name[: MAX_NAME - len(SUFFIX)] + SUFFIX
    schedule: JSON = {"settings": settings, **last}
    return JobSpec.parse({**plain, "name": name, "hyperparameter_schedule": schedule})


def _trained(past: Sequence[Ancestor], last_step: int) -> list[Ancestor]:
    """Return those elements of a lineage in which at least one step was trained."""
    ends = (*(node.from_step for node in past[1:]), last_step)
    return [node for node, end in zip(past, ends, strict=True) if node.from_step < end]
