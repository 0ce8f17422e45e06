"""Robust rules of a federation, which a minority of false updates cannot lead anywhere: the section
`options.robust` of Federated.

Every update counts as one, whatever number of rows its client claims. Says how many updates each
rule needs; how a rule computes is no concern of this module.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Final, TypeAlias, assert_never

from pydantic import Field

from stratagem.common.base import limits
from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import DocumentValue
from stratagem.common.schema.field_types import Positive

MAX_ROBUST_UPDATES: Final = 1024
"""Every update is compared with every other one, or all are sorted element by element."""

_FEWEST_FOR_A_MIDDLE: Final = 3
_ByzantineCount: TypeAlias = Annotated[int, Field(ge=0, le=MAX_ROBUST_UPDATES)]


class Median(DocumentValue, tag="name", name="median", is_extras=True):
    """The median of each element (https://arxiv.org/abs/1803.01498)."""


class TrimmedMean(DocumentValue, tag="name", name="trimmed_mean", is_extras=True):
    """The mean of each element without this share of values at each end
    (https://arxiv.org/abs/1803.01498)."""

    trim: Annotated[float, Field(gt=0, lt=0.5)]

    def num_trimmed(self, num_updates: int) -> int:
        """Return how many values are left out at each end: the share of the updates, rounded
        down."""
        return int(Decimal(repr(self.trim)) * num_updates)


class Krum(DocumentValue, tag="name", name="krum", is_extras=True):
    """The one update that is nearest to its neighbours (Blanchard et al., 2017,
    https://arxiv.org/abs/1703.02757). byzantine: how many updates may be false."""

    byzantine: _ByzantineCount


class MultiKrum(DocumentValue, tag="name", name="multi_krum", is_extras=True):
    """The mean of the `keep` updates that are nearest to their neighbours; None: of all but as many
    as may be false."""

    byzantine: _ByzantineCount
    keep: Annotated[int, Field(ge=1, le=MAX_ROBUST_UPDATES)] | None = None


class Bulyan(DocumentValue, tag="name", name="bulyan", is_extras=True):
    """Updates chosen by Krum, and of each element the mean of the values around their median
    (https://arxiv.org/abs/1802.07927)."""

    byzantine: _ByzantineCount


class GeometricMedian(DocumentValue, tag="name", name="geometric_median", is_extras=True):
    """The point with the least sum of distances to the updates, by a fixed number of Weiszfeld
    iterations from their mean (https://arxiv.org/abs/1912.13445)."""

    iterations: Annotated[int, Field(ge=1, le=1000)] = 8


class NormBound(DocumentValue, tag="name", name="norm_bound", is_extras=True):
    """The mean of updates of which none is further than `norm` from the global model: longer ones
    are shortened to it (https://arxiv.org/abs/1911.07963)."""

    norm: Positive


RobustRule: TypeAlias = (
    Median | TrimmedMean | Krum | MultiKrum | Bulyan | GeometricMedian | NormBound
)


def too_few(rule: RobustRule | None, num_clients: int, quorum: float | None) -> Iterator[Violation]:
    """Yield what is wrong with a rule for rounds of so many clients, closed with the quorum."""
    fewest = fewest_updates(rule)
    if rule is None or fewest == 1:
        return
    needs = f"needs the updates of at least {fewest}"
    if num_clients < fewest:
        yield Violation("options.robust", f"{needs} clients, and a round has {num_clients}")
    elif num_clients > MAX_ROBUST_UPDATES and limits.are_checked():
        text = f"combines at most {MAX_ROBUST_UPDATES} updates, and a round has {num_clients}"
        yield Violation("options.robust", text)
    elif type(quorum) is int and quorum < fewest:
        yield Violation("options.quorum", f"{quorum} is too few: options.robust {needs} clients")


def is_judged(rule: RobustRule | None) -> bool:
    """Return True for a rule that compares whole updates before it combines them."""
    return isinstance(rule, Krum | MultiKrum | Bulyan | GeometricMedian | NormBound)


def fewest_updates(rule: RobustRule | None) -> int:
    """Return the number of updates without which the rule keeps none of its promises."""
    match rule:
        case None | NormBound():
            return 1
        case Median() | GeometricMedian():
            return _FEWEST_FOR_A_MIDDLE
        case TrimmedMean():
            fewest = _FEWEST_FOR_A_MIDDLE
            while not rule.num_trimmed(fewest):
                fewest += 1
            return fewest
        case Krum():
            return 2 * rule.byzantine + 3
        case MultiKrum():
            return max(2 * rule.byzantine + 3, (rule.keep or 0) + rule.byzantine)
        case Bulyan():
            return 4 * rule.byzantine + 3
        case _:
            assert_never(rule)
