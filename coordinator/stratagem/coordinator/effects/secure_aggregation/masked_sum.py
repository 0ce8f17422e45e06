"""What a round's masked updates look like, and the masks that are left in their sum."""

from dataclasses import dataclass, field

from stratagem.common.base.ids import Party, RunId
from stratagem.common.job import JobSpec
from stratagem.common.secure.masks import MaskedLayout, Quantisation
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.strategies.federated.federated_run import spec_of


@dataclass(frozen=True, slots=True)
class OpenedMasks:
    """The masks that are left in the sum of a round's updates."""

    num_members: int
    keys: tuple[tuple[bytes, bool], ...] = field(repr=False)
    """The key of each mask, and whether the client had subtracted it."""

    def rule(self, job: JobSpec) -> Quantisation:
        """Return how changes are whole numbers in the round."""
        return _rule(job, self.num_members)


def masked_manifest(
    env: EffectContext, run_id: RunId, party: Party, model: Manifest, num_members: int
) -> Manifest:
    """Return what the manifest of every masked update of a round is."""
    return MaskedLayout(model).manifest(_rule(env.job_of(run_id, party), num_members))


def _rule(job: JobSpec, num_members: int) -> Quantisation:
    spec = spec_of(job).options.secure_aggregation
    assert spec is not None, "its updates are masked"
    return spec.quantisation(num_members)
