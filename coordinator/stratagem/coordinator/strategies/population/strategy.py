"""PopulationBased trains members side by side; worse members copy better ones and explore from
there.

Population based training is described in https://arxiv.org/abs/1711.09846. One generation:

    TRAINING    every member trains steps_per_generation steps under the inner strategy, and is
                evaluated and committed
    (exploit)   some copy the state and the hyperparameters of better ones
    (explore)   the copied hyperparameters are varied

Members may outnumber the workers and then take turns. A member whose worker is lost repeats its
generation elsewhere. A member that fails has no valid score and is replaced by a better one.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import assert_never

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.base.ids import RunId
from stratagem.common.base.text import counted, values_text
from stratagem.common.job import JobSpec, check_optimizer, member_job
from stratagem.common.job.rules import MEMBERS
from stratagem.common.job.search_space import (
    Categorical,
    Conditional,
    Dimension,
    Float,
    Int,
    Ordinal,
    Plain,
    SearchSpace,
    plain,
)
from stratagem.common.schema.json import JSON
from stratagem.common.schema.table import found_in
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
from stratagem.coordinator.core.strategy_contract import (
    VERSION,
    Repeating,
    RunCounts,
    Status,
    Strategies,
    Strategy,
)
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated.rejections import in_all
from stratagem.coordinator.strategies.population.evolution import (
    BY_DEFINITION,
    Params,
    active_values,
    draw,
    spread,
    stream,
    values_of,
)
from stratagem.coordinator.strategies.population.run import (
    MemberRun,
    PopulationRun,
    add_structural,
    close_generation,
    closed,
    digest,
    evolve_one,
    evolved,
    form,
    formed,
    inner_of,
    is_scored,
    rejected,
    restored,
    space_of,
    spec_of,
)

# ---- Strategy ----


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return violations: hyperparameters that the job lacks, an inner strategy that cannot run."""
    violations = [*found_in(MEMBERS, job)]
    if not isinstance(inner_of(job), PopulationBased):  # whose members would have no job
        violations += check_params(job)
    if violations:
        return violations
    params = draw(space_of(job), stream(job.seed, 0, 0))
    return nested.check_inside(lambda: member_job(job, 0, params), strategies)


def decide(job: JobSpec, value: PopulationRun, world: World, now_s: float) -> Fact | None:
    """Return the next fact of a member or, if there is none, the fact that the scores call for."""
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
    """Return the run value with one fact folded in: of the population, or of a member's party."""
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
    """Return the reason why a reported fact is stale, as its member decides; a member that has
    finished its generation takes no facts. "" if the fact is expected."""
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
    """Return the effects that the members still in training need."""
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
    """Return the fact that completes the run, which names the best member and the failures."""
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
    repeating=Repeating(lambda value: value.committed, restored, digest),
)


# ---- Status ----
#
# The status of a population shows the best member and the number of copies besides the
# generations.


def counts(job: JobSpec, value: PopulationRun) -> RunCounts:
    """Return the progress of the open generation, and the result of the newest closed one."""
    is_even = not spec_of(job).options.asynchronous
    num_scored = sum(map(is_scored, value.members)) if is_even else 0
    newest = value.generation - 1
    origin = value.origins.get(newest)
    best = None if origin is None else _score(job, value, origin.member, newest)
    return RunCounts(
        unit="generations",
        part_done=num_scored / (len(value.members) + 1),  # the last part is the exploitation
        is_even=is_even,
        loss=0.0 if origin is None else _loss(value, origin.member),
        best=best,
        best_member=None if origin is None else origin.member,
        num_copied=_num_copied(job, value) if is_even else 0,
    )


def _score(job: JobSpec, value: PopulationRun, member: int, generation: int) -> float | None:
    """Return a member's score in a generation, with the sign of the metric."""
    score = value.members[member].scores[generation - 1]
    evaluation = job.evaluation
    assert evaluation is not None
    return score if score is None or evaluation.mode == "max" else -score


def _loss(value: PopulationRun, member: int) -> float:
    return nested.progress(value.members[member].child).loss


def _num_copied(job: JobSpec, value: PopulationRun) -> int:
    """Return the number of members that began the open generation as copies of others."""
    begun_at = (value.generation - 1) * (job.steps_per_generation or 1)
    if begun_at == 0:
        return 0
    return sum(member.schedule[-1].from_step == begun_at for member in value.members)


# ---- Hyperparameters ----
#
# A population may vary only some fields of a job. A member copies a state and hyperparameters,
# and then continues from that state with other hyperparameters. A field can therefore be varied
# where the state does not depend on it.

_PREFIXES = ("optimizer.", "loss.kwargs.", "model.kwargs.")
_PHASES = "phases."
_OPTIMIZER = "optimizer.name"
_MAX_CHOICES = 64
_OF_PHASES = (
    "correct_every",
    "trust",
    "max_relative_error",
    "min_correlation",
    "correction_weight",
    "predictor.decay",
    "predictor.damping",
    "predictor.momentum",
    "adaptive.loss_threshold",
)
_LENGTHS = "the lengths of the phases belong to the state that is copied, and adaptation moves them"
_HISTORY = "the gradients that a copied state remembers are those of its predictor"
_WHY_NOT = {
    "full_steps": _LENGTHS,
    "predict_steps": _LENGTHS,
    "warmup_steps": "only the first cycle of a run has a warm-up, and a copied state is behind it",
    "predictor.kind": _HISTORY,
    "predictor.history": _HISTORY,
}


def check_params(job: JobSpec) -> list[Violation]:
    """Return the violations of a search space: every hyperparameter must be a field of the job that
    members may vary."""
    space = space_of(job)
    names = [plain(dimension).name for dimension in space.dimensions]
    violations = [
        violation
        for name in (*names, *space.frozen)
        for violation in check_name(job, name, "search_space")
    ]
    if violations:
        return violations
    for dim in map(plain, space.dimensions):
        if dim.name in BY_DEFINITION and dim.options.structural is False:
            text = "must not be false: it decides what the optimizer keeps"
            return [Violation(f"search_space.{dim.name}.structural", text)]
    violations = [
        violation for dimension in space.dimensions for violation in _check_values(job, dimension)
    ]
    return violations or [
        optimizer for at in space.dimensions for optimizer in _check_optimizers(job, at)
    ]


def check_name(job: JobSpec, name: str, section: str) -> Iterator[Violation]:
    """Yield a violation if this field of the job cannot vary while the same state trains on."""
    where = f"{section}.{name}"
    if name.startswith(_PREFIXES) or _is_of_a_turn(job, name):
        return
    if not name.startswith(_PHASES):
        text = f"is not a hyperparameter; those start with {', '.join(_PREFIXES)}, {_PHASES}"
        yield Violation(where, text)
    elif name.removeprefix(_PHASES) not in _OF_PHASES:
        reason = _WHY_NOT.get(name.removeprefix(_PHASES), "it has no meaning by itself")
        allowed = ", ".join(f"{_PHASES}{phase}" for phase in _OF_PHASES)
        yield Violation(where, f"cannot be varied: {reason}; {allowed} can")
    elif job.phases is None:
        yield Violation(where, "the job has no phases; add that section, empty for its defaults")


def _is_of_a_turn(job: JobSpec, name: str) -> bool:
    """Return True if the name is an optimizer field of a turn, but not the optimizer's name."""
    paths = tuple(f"turns.{turn.name}.optimizer." for turn in job.turns or ())
    kinds = (".optimizer.name", ".optimizer.entrypoint")
    return name.startswith(paths) and not name.endswith(kinds)


def _check_values(job: JobSpec, dimension: Dimension) -> list[Violation]:
    """Return a violation if a member cannot have one end of a range, or one of the choices."""
    space, name = space_of(job), plain(dimension).name
    needed = _conditions(space, dimension)
    others = draw(space, stream(job.seed, 0, 0))
    first = {plain(dim).name: next(values_of(plain(dim))) for dim in space.dimensions}
    for value in _extremes(plain(dimension)):
        alone = {**space.frozen, **needed, name: value}
        # It may need values of other dimensions.
        together = active_values(space, {**first, **others, **needed, name: value})
        why = _why_not(job, alone)
        if why and _why_not(job, together):
            return [Violation(f"search_space.{name}", why)]
    return []


def _check_optimizers(job: JobSpec, dimension: Dimension) -> Iterator[Violation]:
    """Yield a violation if a keyword could be sampled for an optimizer that does not take it."""
    space, name = space_of(job), plain(dimension).name
    chosen = next((dim for dim in space.dimensions if plain(dim).name == _OPTIMIZER), None)
    if chosen is None or name == _OPTIMIZER or not name.startswith("optimizer."):
        return
    first = {plain(dim).name: next(values_of(plain(dim))) for dim in space.dimensions}
    needed = {**_conditions(space, chosen), **_conditions(space, dimension)}
    for optimizer in _extremes(plain(chosen)):
        params = active_values(space, {**first, **needed, _OPTIMIZER: optimizer})
        if name in params and (why := _unknown(job, params, name)):
            text = f"{why}; draw it where it is taken: when: {{{_OPTIMIZER}: [...]}}"
            yield Violation(f"search_space.{name}", text)
            return


def _unknown(job: JobSpec, params: Params, name: str) -> str:
    """Return the reason why a member's optimizer does not take this keyword; "" if it does, or if
    the hyperparameters make no valid job."""
    try:
        optimizer = member_job(job, 0, params).optimizer
    except InvalidInputError:
        return ""
    assert optimizer is not None  # a member trains
    field = f"optimizer.{name.rpartition('.')[2]}"
    return next(
        (violation.message for violation in check_optimizer(optimizer) if violation.field == field),
        "",
    )


def _conditions(space: SearchSpace, dimension: Dimension) -> dict[str, JSON]:
    """Return values of parent dimensions under which this conditional dimension is active."""
    by_name = {dim.name: dim for dim in space.dimensions}
    conditions: dict[str, JSON] = {}
    while isinstance(dimension, Conditional):
        parent = by_name[dimension.parent]
        conditions[plain(parent).name] = dimension.parent_values[0]
        dimension = parent
    return conditions


def _extremes(dimension: Plain) -> list[JSON]:
    match dimension:
        case Categorical(choices=choices) | Ordinal(choices=choices):
            return [choices[at] for at in spread(len(choices), _MAX_CHOICES)]
        case Float(low=low, high=high) | Int(low=low, high=high):
            return [low, high]
        case _:
            assert_never(dimension)


def _why_not(job: JobSpec, params: Params) -> str:
    """Return the reason why a member cannot have these hyperparameters; "" if it can."""
    try:
        optimizer = member_job(job, 0, params).optimizer
    except InvalidInputError as error:
        return "; ".join(violation.message for violation in error.violations) or str(error)
    if optimizer is None:
        return ""
    if optimizer.plateau is not None:
        return "plateau is not allowed in a population, whose members copy each other's states"
    return "; ".join(violation.message for violation in check_optimizer(optimizer))
