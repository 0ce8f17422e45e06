"""Decide by pure functions what a verification computes again, and what it may compare.

A verification accuses nobody in doubt: claims that timing, machines, secrets, other data or other
numerics may have changed are not compared, and the reason is reported.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from stratagem.client.course.claims import (
    NUM_ROWS,
    NUM_SAMPLES,
    ROSTER,
    ROWS,
    RULES,
    Claim,
    ClaimPlace,
    Input,
    RunClaims,
    inputs_of,
)
from stratagem.client.course.step_history import History
from stratagem.client.course.views import Event, RunStatus
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.numerics import rules
from stratagem.common.numerics.verification import share_of
from stratagem.common.strategy import ByCapability, Federated
from stratagem.common.strategy.strategies import DataParallel, Local, ModelParallel

RESUMABLE: Final = (Local, DataParallel, ModelParallel)
"""Strategies under which a run resumed from a commit has the same bits as an uninterrupted run."""

# ---- Steps ----


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of steps that one verifying run computes."""

    base: int | None
    """The segment whose stored state the verifying run begins with; None: the start of the job."""
    from_step: int
    to_step: int


def stretches(steps: Iterable[int], stored: Mapping[int, int]) -> list[Stretch]:
    """Return the ranges of steps to compute so that the states after all given steps are reached.

    stored: the segment of each stored state that a run may begin with, keyed by the state's step.
    """
    plan: list[Stretch] = []
    for step in sorted(steps):
        base_step = max((stored_step for stored_step in stored if stored_step < step), default=None)
        if plan and (base_step is None or base_step <= plan[-1].to_step):
            last = plan[-1]
            plan[-1] = Stretch(last.base, last.from_step, step)
        elif base_step is None:
            plan.append(Stretch(None, -1, step))
        else:
            plan.append(Stretch(stored[base_step], base_step, step))
    return plan


def root_steps(claims: RunClaims) -> dict[ClaimPlace, int]:
    """Return, for the place of each claim, the step up to which a run must be computed to make the
    claim. For claims about a part of the run it is the step of the next state of the whole run, or
    of its last state if none follows; otherwise it is the step of the place itself."""
    steps: dict[ClaimPlace, int] = {}
    has_root, following = any(place.is_root_state for place in claims.by_place), claims.last_step
    for place in reversed(claims.by_place):
        if place.is_root_state:
            following = place.step
        steps[place] = following if has_root and place.party else place.step
    return steps


def chosen_steps(
    claims: RunClaims, segments: Collection[int] | None, sample: float | None, seed: int
) -> set[int]:
    """Return the steps whose states to verify: all, those of segments, or of a sample, which is the
    same each time and has at least one segment. Raises InvalidInputError for a wrong choice."""
    if segments is not None and sample is not None:
        raise InvalidInputError.at("--sample", "is not possible with --segments; leave one out")
    root = [claim for place, claim in claims.by_place.items() if place.is_root_state]
    states = {
        claim.segment: claim.place.step
        for claim in root or claims.by_place.values()
        if claim.place.client is None
    }
    if segments is not None:
        return _steps_of(segments, states)
    if sample is None:
        return set(root_steps(claims).values())
    if not 0 < sample <= 1:
        raise InvalidInputError.at("--sample", f"{sample} is not above 0 and at most 1")
    shares = {share_of(seed, segment): step for segment, step in states.items()}
    return {step for share, step in shares.items() if share < sample or share == min(shares)}


def _steps_of(segments: Collection[int], states: Mapping[int, int]) -> set[int]:
    missing = next((number for number in segments if number not in states), None)
    if missing is not None or not segments:
        which = "none is named" if missing is None else f"{missing} is no segment with a state"
        text = f"{which}; this run has states of {ranges(states) or 'none'}"
        raise InvalidInputError.at("--segments", text)
    return {states[segment] for segment in segments}


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges, such as "0:3,7"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}:{b}" for a, b in spans)


def kept_states(job: JobSpec, status: RunStatus) -> dict[int, int]:
    """Return the segment of each stored state with which a verifying run may begin, by step."""
    options = getattr(job.strategy, "options", None)
    is_whole = getattr(options, "local_steps", None) is None and job.hyperparameter_schedule is None
    if not isinstance(job.strategy, RESUMABLE) or not is_whole:
        return {}
    return {commit.step: commit.segment for commit in status.commits}


# ---- Comparison ----


def doubt_of_job(job: JobSpec, numerics: int = rules.CURRENT) -> str:
    """Return the reason why a second execution of the job may give other bits; "" if there is none.
    numerics: the number of the rules of arithmetic that the run followed."""
    if not job.execution.deterministic:
        return "execution.deterministic: false permits sums in any order"
    if job.privacy is not None and job.privacy.noise == "secret":
        return "privacy.noise: secret draws other noise in each run, and spends more of the budget"
    if numerics != rules.CURRENT:
        return f"the run followed numerics rules {numerics}; a new run follows {rules.CURRENT}"
    return ""


def compared_inputs(job: JobSpec, inputs: Mapping[Input, Any]) -> dict[Input, Any]:
    """Return those inputs of a run that must be equal in a second execution of its job."""
    is_local, strategy = job.data.worker_local is not None, cast("Any", job.strategy)
    is_bound = is_local
    while strategy is not None:
        selection = strategy.client_selection if isinstance(strategy, Federated) else None
        is_bound = is_bound or isinstance(selection, ByCapability)
        strategy = getattr(getattr(strategy, "options", None), "inner", None)
    wanted = {
        RULES,
        NUM_SAMPLES,
        *(() if is_local else (NUM_ROWS, ROWS)),
        *((ROSTER,) if is_bound else ()),
    }
    return {key: value for key, value in inputs.items() if key[0] in wanted}


def other_input(mine: Mapping[Input, Any], event: Event) -> str:
    """Describe the first input in an event of a verifying run that differs from the verified run's,
    in `mine`; "" if none differs."""
    for (kind, party), here in inputs_of(event).items():
        there = mine.get((kind, party), here)
        if there == here:
            continue
        at = f" of {party}" if party else ""
        if kind == ROWS:
            return f"the data{at} changed: their first rows are others"
        if kind in (NUM_ROWS, NUM_SAMPLES):
            return f"the data{at} changed: {there} rows in the run, {here} here"
        if kind == ROSTER:
            client = next(c for c in sorted({*there, *here}) if there.get(c) != here.get(c))
            names = f"{there.get(client)} in the run, {here.get(client)} here"
            return f"client {client}{at} is another worker: {names}"
        return f"{kind}{at} differ: {there} in the run, {here} here"
    return ""


def why_incomparable(run: Claim, again: Claim) -> str:
    """Return the reason why a second execution's claim, and later ones, may differ; "" if none."""
    if again.doubt:
        return f"in the verifying run, {again.doubt}"
    if run.numerics and again.numerics and run.numerics != again.numerics:
        return f"numerics differ: {run.numerics} in the run, {again.numerics} here"
    return ""


def first_step(run: History, again: History) -> tuple[int, str, tuple[float, float]] | None:
    """Return the first common step in which two histories differ, with the name of the series and
    its two values; None if the histories do not differ."""
    differences: list[tuple[int, str, tuple[float, float]]] = []
    for name, series in run.items():
        other = again.get(name)
        if series.observed or other is None or other.stride != series.stride:
            continue
        steps, rows, other_rows = np.intersect1d(series.step, other.step, return_indices=True)
        mine, theirs = series.last[rows], other.last[other_rows]
        differ = (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs))
        if differ.any():
            at = int(differ.argmax())
            differences.append((int(steps[at]), name, (float(mine[at]), float(theirs[at]))))
    return min(differences, default=None)
