"""Facts of populations: members, generations, and who was copied."""

from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core.facts.fact_values import Metrics, PlainValues, Value


class PopulationFormed(Value):
    """A population is formed, with the first hyperparameters of every member, in order of
    member."""

    party: Party
    params: tuple[PlainValues, ...]
    structural: tuple[str, ...] | None = None
    """Hyperparameters that are known to be structural before any model is built. None, in
    populations of earlier versions: copies may vary all, and are asked for them in the order of the
    job's text instead of that of their names."""


class Copied(Value):
    """A member continues from another one's state, with hyperparameters of its own."""

    member: int
    donor: int
    digest: Digest
    step: int
    params: PlainValues


class MemberEvolved(Value):
    """One member has trained a generation and continues at once, without waiting for the others."""

    party: Party
    generation: int
    member: int
    score: float | None
    copied: Copied | None = None


class GenerationClosed(Value):
    """All members have trained a generation. The best one's state is the run's commit."""

    party: Party
    generation: int
    scores: tuple[float | None, ...]
    """Higher is better, by member; None: invalid."""
    best: int
    digest: Digest
    step: int
    metrics: Metrics
    params: PlainValues
    """Hyperparameters of the best member when it reached its score."""
    copied: tuple[Copied, ...] = ()
    by_policy: bool = False
    """True when the order in which members finished has decided something."""
