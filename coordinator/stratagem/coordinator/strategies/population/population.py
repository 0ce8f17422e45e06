"""PopulationBased: members train side by side; the worse copy the better and explore from there.

Population based training, https://arxiv.org/abs/1711.09846. One generation:

    TRAINING    every member trains steps_per_generation steps under the inner strategy, and is
                evaluated and committed
    (exploit)   some copy the state and the hyperparameters of better ones
    (explore)   what was copied is varied

Members may outnumber the workers: they take turns. A member whose worker is lost trains its
generation again elsewhere. One that fails has no valid score and is replaced by a better one.
"""

from dataclasses import replace
from itertools import chain

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import RunId
from stratagem.common.base.text import counted, values_text
from stratagem.common.job import JobSpec, member_job
from stratagem.common.job.strategy_rules import check_members
from stratagem.common.strategy import PopulationBased
from stratagem.coordinator.core.effects import Build, Effect
from stratagem.coordinator.core.facts import (
    Fact,
    GenerationClosed,
    MemberEvolved,
    ModelBuilt,
    PartyFailed,
    PopulationFormed,
    RunCompleted,
    RunResumed,
)
from stratagem.coordinator.core.state import RunPhase, World
from stratagem.coordinator.core.strategy_contract import VERSION, Status, Strategy
from stratagem.coordinator.core.strategy_table import Strategies
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated.update_rejections import in_all
from stratagem.coordinator.strategies.population.evolution import draw, stream
from stratagem.coordinator.strategies.population.hyperparameters import check_params
from stratagem.coordinator.strategies.population.population_counts import counts
from stratagem.coordinator.strategies.population.population_run import (
    MemberRun,
    PopulationRun,
    add_structural,
    close_generation,
    closed,
    evolve_one,
    evolved,
    form,
    formed,
    inner_of,
    is_scored,
    rejected,
    space_of,
    spec_of,
)


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Refuse hyperparameters that the job does not have, and an inner strategy that cannot run."""
    violations = [*check_members(job)]
    if not isinstance(inner_of(job), PopulationBased):  # whose members would have no job
        violations += check_params(job)
    if violations:
        return violations
    params = draw(space_of(job), stream(job.seed, 0, 0))
    return nested.check_inside(lambda: member_job(job, 0, params), strategies)


def decide(job: JobSpec, value: PopulationRun, world: World, now_s: float) -> Fact | None:
    """Return the members' own decisions; then what follows from their scores."""
    if not value.members:
        return form(job, value)
    if value.generation > spec_of(job).generations:
        return _completed(job, value)
    for member in _in_training(value):
        siblings = [child for child in value.children() if child is not member.child]
        beside = nested.world_beside(world, siblings)
        if fact := nested.decide(member.child, beside, now_s):
            return fact
    if spec_of(job).options.asynchronous and (fact := evolve_one(job, value)):
        return fact
    return close_generation(job, value)


def transition(job: JobSpec, value: PopulationRun, fact: Fact, now_s: float) -> PopulationRun:
    """Fold one fact: the population's own, or one of a member's party."""
    match fact:
        case PopulationFormed():
            return formed(job, value, fact)
        case GenerationClosed(party=value.party):
            return closed(job, value, fact)
        case MemberEvolved(party=value.party):
            return evolved(job, value, fact)
        case _:
            members = tuple(_folded(member, fact, now_s) for member in value.members)
            value = replace(value, members=members)
    match fact:
        case ModelBuilt():
            return add_structural(job, value, fact)
        case PartyFailed():
            numbers = {member.child.party: number for number, member in enumerate(value.members)}
            if fact.party in numbers:
                failures = value.failures.with_one(numbers[fact.party], fact)
                return replace(value, failures=failures)
    return value


def reject_reason(_job: JobSpec, value: PopulationRun, fact: Fact) -> str:
    """Return why a reported fact is stale, as its member decides; a member that has failed takes
    nothing more in this generation."""
    for member in value.members:
        if nested.is_of(member.child, fact):
            if is_scored(member):
                return f"{member.child.party} has ended generation {member.generation}"
            if isinstance(fact, PartyFailed) and fact.party == member.child.party:
                return ""
            return nested.reject_reason(member.child, fact)
    return f"there is no party {getattr(fact, 'party', '')!r}"


def pending(
    run_id: RunId, job: JobSpec, value: PopulationRun, _horizon: int | None
) -> frozenset[Effect]:
    """Return the effects that the members that still train need."""
    looks = value.structural is not None and spec_of(job).generations > 1
    return frozenset(
        replace(effect, params=member.params) if looks and isinstance(effect, Build) else effect
        for member in _in_training(value)
        for effect in nested.pending(run_id, member.child)
    )


def status(job: JobSpec, value: PopulationRun, world: World) -> Status:
    """Return the run's status, for people."""
    done, generations = value.generation - 1, spec_of(job).generations
    training = _in_training(value)
    members = nested.members(value.children())
    scored = len(value.members) - len(training)
    reason = f"generation {value.generation}: {scored} of {len(value.members)} members have a score"
    if failed := value.failures.text(len(value.members)):
        reason = f"{reason}; {failed}"
    phase, strategy_phase = RunPhase.RUNNING, "TRAINING"
    waiting = next(filter(None, (nested.why_waiting(m.child, world) for m in training)), "")
    if not members:
        has_begun = any(nested.progress(child).committed for child in value.children())
        phase = RunPhase.RECOVERING if has_begun else RunPhase.PLACING
        strategy_phase, reason = "WAITING", waiting
    elif waiting:
        phase, reason = RunPhase.RECOVERING, f"{reason}; {waiting}"
    return Status(
        phase=phase,
        strategy_phase=strategy_phase,
        reason=reason,
        step=done,
        num_steps=generations,
        segment=done,
        num_segments=generations,
        members=members,
        origins=value.origins,
        counts=counts(job, value),
    )


def _completed(job: JobSpec, value: PopulationRun) -> RunCompleted:
    """Return the end of the run: whose state is the result, and what has failed on the way."""
    number = value.generation - 1
    parts = [f"{counted(number, 'generation')} committed"]
    origin = value.origins[number]
    values = values_text(origin.schedule[-1].values)
    parts.append(f"member {origin.member} is best, with {values}")
    parts.append(value.failures.text(len(value.members)))
    parts.append(in_all(job, chain.from_iterable(map(rejected, value.members))))
    return RunCompleted(reason="; ".join(filter(None, parts)))


def _in_training(value: PopulationRun) -> list[MemberRun]:
    return [member for member in value.members if not is_scored(member)]


def _folded(member: MemberRun, fact: Fact, now_s: float) -> MemberRun:
    """Return the member with a fact of its party, or of the whole run, folded in."""
    if isinstance(fact, PartyFailed) and fact.party == member.child.party:
        return replace(member, failure=fact)
    if nested.is_of(member.child, fact) or isinstance(fact, RunResumed):
        return replace(member, child=nested.transition(member.child, fact, now_s))
    return member


STRATEGY = Strategy(
    version=VERSION,
    check=check,
    init=lambda _job, party, strategies: PopulationRun(party, strategies),
    decide=decide,
    transition=transition,
    reject_reason=reject_reason,
    pending=pending,
    status=status,
    children=lambda value: value.children(),
    working=lambda value: [member.child for member in _in_training(value)],
)
