"""Successive halving, https://arxiv.org/abs/1502.07943: train all, keep the better half, repeat.

config: {"learning_rates": [...], "rungs": R, "steps_per_rung": S}. Every learning rate is a party
(`lr0`, `lr1`, ...) that trains under Local; after each rung the worse half is stopped, and the best
member's state becomes the commit of the rung.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Party, RunId, child_party
from stratagem.common.job import JobSpec, with_fields
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import (
    Fact,
    Noted,
    PartyFailed,
    RunCompleted,
    RunFailed,
    RunResumed,
)
from stratagem.coordinator.core.strategy_contract import Child, Status, Strategies, Strategy
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies import nested


@dataclass(frozen=True, slots=True)
class Halving:
    """The run value: who is left, and the rung that they train."""

    rung: int
    left: tuple[Child, ...]
    failed: tuple[str, ...] = ()


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    config = _config(job)
    found = []
    rates = config.get("learning_rates")
    if not isinstance(rates, list) or not rates or not all(_is_positive(rate) for rate in rates):
        found.append(Violation("strategy.config.learning_rates", "must be positive numbers"))
    for name in ("rungs", "steps_per_rung"):
        count = config.get(name)
        if type(count) is not int or count < 1:
            found.append(Violation(f"strategy.config.{name}", "must be a count >= 1"))
    if job.evaluation is None or job.evaluation.best is None:
        found.append(Violation("evaluation.best", "missing; members are compared by it"))
    return found or nested.check(_member_job(job, config["learning_rates"][0]), strategies)


def init(job: JobSpec, party: Party, strategies: Strategies) -> Halving:
    rates = _config(job)["learning_rates"]
    children = [
        nested.begin(child_party(party, f"lr{number}"), _member_job(job, rate), 1, strategies)
        for number, rate in enumerate(rates)
    ]
    return Halving(1, tuple(children))


def decide(job: JobSpec, value: Halving, world: World, now_s: float) -> Fact | None:
    if not value.left:
        return RunFailed(reason=f"no learning rate is left: {', '.join(value.failed)}")
    if value.rung > _config(job)["rungs"]:
        return RunCompleted(reason=f"{value.left[0].party} is the best")
    for child in value.left:
        if not nested.is_at_horizon(child):
            siblings = [other for other in value.left if other is not child]
            if fact := nested.decide(child, nested.world_beside(world, siblings), now_s):
                return fact
    if not all(nested.is_at_horizon(child) for child in value.left):
        return None
    return _close_rung(job, value)


def _close_rung(job: JobSpec, value: Halving) -> Noted:
    ranked = sorted(value.left, key=lambda child: _score(job, child), reverse=True)
    is_last = value.rung == _config(job)["rungs"]
    kept = ranked[: 1 if is_last else math.ceil(len(ranked) / 2)]
    best = nested.progress(kept[0])
    assert best.committed is not None
    return Noted(
        party=Party(""),
        kind="rung",
        data={"kept": [child.party for child in kept]},
        reason=f"{value.rung}: {', '.join(child.party for child in kept)} of {len(ranked)} go on",
        segment=value.rung,
        digest=best.committed.digest,
        step=best.committed.step,
        metrics=best.metrics,
    )


def transition(job: JobSpec, value: Halving, fact: Fact, now_s: float) -> Halving:
    match fact:
        case Noted(kind="rung"):
            kept = [child for child in value.left if child.party in fact.data["kept"]]
            further = [replace(child, horizon=value.rung + 1) for child in kept]
            return replace(value, rung=value.rung + 1, left=tuple(further))
        case PartyFailed():
            left = tuple(child for child in value.left if child.party != fact.party)
            return replace(value, left=left, failed=(*value.failed, fact.reason))
        case _:
            is_for_all = isinstance(fact, RunResumed)
            folded = [
                nested.transition(c, fact, now_s) if is_for_all or nested.is_of(c, fact) else c
                for c in value.left
            ]
            return replace(value, left=tuple(folded))


def reject_reason(job: JobSpec, value: Halving, fact: Fact) -> str:
    for child in value.left:
        if nested.is_of(child, fact):
            return "" if isinstance(fact, PartyFailed) else nested.reject_reason(child, fact)
    return "its member has been stopped"


def pending(run_id: RunId, job: JobSpec, value: Halving, horizon: int | None) -> frozenset[Effect]:
    return frozenset[Effect]().union(*(nested.pending(run_id, child) for child in value.left))


def status(job: JobSpec, value: Halving, world: World) -> Status:
    done = sum(nested.is_at_horizon(child) for child in value.left)
    return Status(
        phase=RunPhase.RUNNING,
        strategy_phase="TRAINING",
        reason=f"rung {value.rung}: {done} of {len(value.left)} are done",
        step=value.rung - 1,
        num_steps=_config(job)["rungs"],
        segment=value.rung - 1,
        num_segments=_config(job)["rungs"],
        members=nested.members(value.left),
    )


def _config(job: JobSpec) -> dict[str, Any]:
    config = getattr(job.strategy, "config", None)
    return config if isinstance(config, dict) else {}


def _member_job(job: JobSpec, rate: float) -> JobSpec:
    config = _config(job)
    every = f"{config['steps_per_rung']} steps"
    fields = {
        "strategy": {"type": "Local"},
        "steps": config["rungs"] * config["steps_per_rung"],
        "epochs": None,
        "evaluation.every": every,
        "checkpoint.every": every,
        "optimizer.lr": rate,
    }
    return with_fields(job, fields)


def _score(job: JobSpec, child: Child) -> float:
    evaluation = job.evaluation
    assert evaluation is not None
    score = nested.progress(child).metrics.get(f"{evaluation.split}.{evaluation.best}", math.nan)
    score = score if evaluation.mode == "max" else -score
    return score if math.isfinite(score) else -math.inf


def _is_positive(rate: object) -> bool:
    return isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0


STRATEGY = Strategy(
    version=2,
    check=check,
    init=init,
    decide=decide,
    transition=transition,
    reject_reason=reject_reason,
    pending=pending,
    status=status,
    children=lambda value: value.left,
)
