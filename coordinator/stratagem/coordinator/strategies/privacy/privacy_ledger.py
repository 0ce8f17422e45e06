"""The ledger of a private run: what its rounds have spent, and how the next one is noised.

Each round is accounted before it is opened: an effect draws its clients in secret and computes
what all rounds will have cost with it. A round that would cost more than the target is never
opened, and one that was opened has been paid for, whatever becomes of it: also one without
clients, and one that the run has gone back behind since. Pure functions of the ledger.
"""

from dataclasses import dataclass, replace

from stratagem.common.base.ids import Party, RunId
from stratagem.common.base.text import beyond_text, counted
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import AccountRound
from stratagem.coordinator.core.facts import (
    RoundAccounted,
    RunFailed,
    SegmentCommitted,
    StoppedEarly,
)

EPSILON = "privacy.epsilon"
"""Metric: what a run has spent with the round of its commit."""


@dataclass(frozen=True, slots=True)
class PrivacyLedger:
    """What a run has spent, and what is known of the round that is open or comes next."""

    clip_norm: float
    """That of the next round to be accounted."""
    noise_multiplier: float | None
    """None: the first round calibrates it."""
    num_spent: int = 0
    epsilon: float = 0.0
    """Spent with all rounds that were opened."""
    fingerprint: str = ""
    round: RoundAccounted | None = None
    """The round that is open, or is accounted and about to be."""


def begun(job: JobSpec) -> PrivacyLedger | None:
    """Return the ledger of a run that has spent nothing; None where no clients are protected."""
    if job.privacy is None or job.privacy.unit != "client":
        return None
    return PrivacyLedger(job.privacy.clip.norm, job.privacy.noise_multiplier)


def with_fact(ledger: PrivacyLedger, fact: RoundAccounted | SegmentCommitted) -> PrivacyLedger:
    """Fold the account of the next round, or the commit of the open one."""
    if isinstance(fact, RoundAccounted):
        noise, fingerprint = fact.noise_multiplier, fact.fingerprint
        return replace(ledger, round=fact, noise_multiplier=noise, fingerprint=fingerprint)
    norm = ledger.clip_norm if fact.clip_norm is None else fact.clip_norm
    return replace(ledger, round=None, clip_norm=norm)


def with_opened(ledger: PrivacyLedger) -> PrivacyLedger:
    """Return the ledger after the accounted round was opened."""
    assert ledger.round is not None
    return replace(ledger, num_spent=ledger.num_spent + 1, epsilon=ledger.round.epsilon)


def returned(ledger: PrivacyLedger | None) -> PrivacyLedger | None:
    """Return the ledger after the run went back to an earlier commit: what is spent stays spent."""
    return None if ledger is None else replace(ledger, round=None)


def accounting(
    run_id: RunId,
    party: Party,
    ledger: PrivacyLedger,
    round_num: int,
    candidates: tuple[int, ...],
) -> AccountRound | None:
    """Return the effect that accounts the next round; None where that has been done."""
    if ledger.round is not None:
        return None
    return AccountRound(
        run_id,
        party,
        round_num,
        candidates,
        ledger.num_spent,
        ledger.clip_norm,
        ledger.noise_multiplier,
        ledger.fingerprint,
    )


def beyond_budget(
    job: JobSpec, ledger: PrivacyLedger, segment: int
) -> StoppedEarly | RunFailed | None:
    """Return the end of a run whose accounted round would cost more than its target.

    segment: the newest committed round.
    """
    assert job.privacy is not None
    target, known = job.privacy.target, ledger.round
    if known is None or target.epsilon is None or known.epsilon <= target.epsilon:
        return None
    budget = f"{ledger.epsilon:.3g} of {target.epsilon:g} spent"
    cost = beyond_text(known.epsilon, target.epsilon)
    text = f"privacy budget: {budget}, round {known.round_num} would cost {cost}"
    if not ledger.num_spent:
        return RunFailed(reason=f"{text}; more noise, or clients drawn more rarely, cost less")
    return StoppedEarly(
        reason=f"stopped early after {counted(segment, 'round')}: {text}", step=segment
    )


def privacy_metrics(ledger: PrivacyLedger) -> dict[str, float]:
    """Return the metrics of a private round: nothing of its clients."""
    assert ledger.round is not None
    return {EPSILON: ledger.epsilon, "privacy.clip_norm": ledger.round.clip_norm}
