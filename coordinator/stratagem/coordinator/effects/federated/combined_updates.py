"""By which rule of the job the accepted updates of a round become the next state, and which of
them the fold reads with what weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.common.job import JobSpec
from stratagem.common.strategy import FedProx
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.effects import AggregateRound
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.account_round import PrivateRound
from stratagem.coordinator.effects.secure_aggregation.masked_sum import OpenedMasks
from stratagem.coordinator.strategies.federated.federated_run import spec_of
from stratagem.coordinator.strategies.federated.late_updates import weight
from stratagem.coordinator.updates.folding.fold import Combination, mean_factors
from stratagem.coordinator.updates.folding.region_sums import MeanOfSums
from stratagem.coordinator.updates.folding.regional_mean import RegionalMean
from stratagem.coordinator.updates.robust.rules import combination, places_read
from stratagem.coordinator.updates.secure.secure_mean import SecureMean
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.weighing.controlled_mean import ControlledMean
from stratagem.coordinator.updates.weighing.normalized_steps import length_of_steps, nova_factors
from stratagem.coordinator.updates.weighing.scaled_changes import ScaledChanges, Shares


@dataclass(frozen=True, slots=True)
class CombinedUpdates:
    """What a fold is made of."""

    entries: Sequence[SpoolEntry]
    """The updates that the fold reads; none where the rule reads them itself."""
    weights: Sequence[float]
    """Of each of them."""
    rule: Combination | None
    """What takes the place of the weighted mean."""


def combined_updates(
    env: EffectContext,
    effect: AggregateRound,
    entries: Sequence[SpoolEntry],
    protection: PrivateRound | OpenedMasks | None,
    manifest: Manifest,
    state: StateReader,
) -> CombinedUpdates:
    """Return the rule of the effect's job over the accepted updates, which stand in client order.

    protection: the noise of a private round, or the opened masks of a secure one; manifest, state:
    of the state that the round began from.
    """
    job = env.job_of(effect.run_id, effect.party)
    options, weights = spec_of(job).options, [weight(job, each) for each in effect.accepted]
    rule: Combination | None = None
    if isinstance(protection, PrivateRound):
        rule = protection.mean(manifest, state)
    elif protection is not None:
        rule = SecureMean(entries, protection.keys, protection.rule(job), manifest, state)
        return CombinedUpdates((), (), rule)
    elif options.robust is not None:
        places = places_read(options.robust, len(entries), effect.weights)
        entries, weights = [entries[at] for at in places], [1.0] * len(places)
        counted = [effect.weights[at] for at in places] if effect.weights else weights
        rule = combination(options.robust, counted, state)
    elif options.q is not None or options.normalize is not None:
        shares = _shares(job, effect, weights, env.numerics_of(effect.run_id))
        rule = ScaledChanges(shares, manifest, state)
    elif options.control is not None:
        num_clients, is_anew = spec_of(job).num_clients, effect.is_control_anew
        rule = ControlledMean(weights, num_clients, manifest, state, begins_anew=is_anew)
    elif effect.integers_of is not None:
        rule = MeanOfSums(entries, weights, manifest, effect.integers_of)
        return CombinedUpdates((), (), rule)
    elif effect.regions:
        rule = RegionalMean(effect.regions, weights)
    return CombinedUpdates(entries, weights, rule)


def _shares(job: JobSpec, effect: AggregateRound, rows: list[float], numerics: int) -> Shares:
    """Return what the changes count: by losses, buffers by the same in shares of one; or by rows
    and steps, buffers by rows."""
    largest = rows.index(max(rows))
    if spec_of(job).options.normalize is not None:
        lengths = [_length(job, number) for number in effect.num_steps]
        return Shares(nova_factors(rows, lengths), *mean_factors(rows, numerics), largest)
    factors = effect.weights
    means = mean_factors(factors if any(factors) else [1.0] * len(factors), numerics)
    return Shares(factors, *means, largest)


def _length(job: JobSpec, num_steps: int) -> float:
    """Return how far so many steps of a client go under a gradient of one."""
    assert job.optimizer is not None, "the job was checked"
    aggregation = spec_of(job).aggregation
    pull = job.optimizer.lr * aggregation.mu if isinstance(aggregation, FedProx) else 0.0
    return length_of_steps(num_steps, job.optimizer.kwargs.get("momentum", 0.0), pull)
