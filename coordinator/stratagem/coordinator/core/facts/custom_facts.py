"""Facts of strategies of other packages, which have none of their own."""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core.facts.fact_values import Number, PlainValues, Value


class Noted(Value):
    """A decision of a strategy that has no fact of its own for it."""

    party: Party
    kind: str
    """What was decided, in the strategy's own words."""
    data: PlainValues
    """Plain JSON values that the strategy folds into its run value."""
    reason: str = ""
    segment: int = 0
    digest: Digest = Digest("")
    """A state, of any party below, that becomes the run's commit of this segment."""
    step: int = 0
    metrics: Mapping[str, Number] = {}
    by_policy: bool = False
    """True when timing has decided: the result is replayable, not reproducible."""
